#!/usr/bin/env bash
# Attention2D and its ring baseline on 64 ranks of one core each.
#
#   sbatch jobs/slurm_cpu.sh      from the repository's root, after editing what follows
#
#SBATCH --job-name=a2d_mpi
#SBATCH --account=CHANGE_ME
#SBATCH --partition=CHANGE_ME
#SBATCH --ntasks=64
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

modules=()                     # what `module load` gets: Python, MPI
mpi=pmix                       # a plugin that `srun --mpi=list` names; MPICH wants pmi2
venv=.venv-site                # see jobs/slurm.sh
input=data/minilm_l3_65536.h5  # made if missing, with as many tokens
tokens=65536
output=results                 # a folder that all nodes see

source jobs/slurm.sh
