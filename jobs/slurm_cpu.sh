#!/usr/bin/env bash
# Attention2D and its ring baseline on 64 ranks of one core each.
#
#   sbatch jobs/slurm_cpu.sh      from the repository's root, after editing the lines below
#
#SBATCH --job-name=a2d_mpi
#SBATCH --account=CHANGE_ME
#SBATCH --partition=CHANGE_ME
#SBATCH --ntasks=64
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

modules=()  # what `module load` gets: Python, MPI
# The others may also come from the environment: tokens=131072 sbatch ...
mpi=${mpi:-pmix}  # a plugin that `srun --mpi=list` names; MPICH wants pmi2
device=${device:-cpu}
venv=${venv:-.venv-site}  # see jobs/slurm.sh
tokens=${tokens:-65536}
input=${input:-data/minilm_l3_$tokens.h5}  # made if missing, with as many tokens
trials=${trials:-10}
output=${output:-results}  # a folder that all nodes see

source jobs/slurm.sh
