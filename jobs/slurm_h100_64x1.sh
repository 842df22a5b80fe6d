#!/usr/bin/env bash
# Attention2D and its ring baseline on 64 nodes of 1 H100, one rank per GPU.
# The ranks compute on the GPUs, for which the environment needs CuPy (see jobs/slurm.sh).  With
# device=cpu they compute on CPU cores, and the GPUs stay idle.  This job has not run on GPUs yet.  The
# numbers of nodes and GPUs are from Attention2D's paper.
#
#   sbatch jobs/slurm_h100_64x1.sh      from the repository's root, after editing the lines below
#
#SBATCH --job-name=a2d_mpi
#SBATCH --account=CHANGE_ME
#SBATCH --partition=CHANGE_ME
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

modules=()  # what `module load` gets: Python, MPI
# The others may also come from the environment: tokens=131072 sbatch ...
mpi=${mpi:-pmix}  # a plugin that `srun --mpi=list` names; MPICH wants pmi2
device=${device:-gpu}
venv=${venv:-.venv-site}  # see jobs/slurm.sh
tokens=${tokens:-65536}
input=${input:-data/minilm_l3_$tokens.h5}  # made if missing, with as many tokens
trials=${trials:-10}
output=${output:-results}  # a folder that all nodes see

source jobs/slurm.sh
