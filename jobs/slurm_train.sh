#!/usr/bin/env bash
# Train a GPT on all ranks of an allocation.  With survive=1 the job continues when ranks die.
#
#   sbatch jobs/slurm_train.sh               from the repository's root, after editing the lines below
#   survive=1 sbatch jobs/slurm_train.sh     with an Open MPI that has ULFM
#
# --no-kill keeps the allocation when a node fails.  Without survive=1 srun ends the job when a rank
# dies.  With survive=1 any ranks may die, even all ranks of a node.  But Open MPI 5.0.11 ends the job
# if its daemon on a node dies.  If you submit the job again, it continues from the latest checkpoint.
#
#SBATCH --job-name=a2d_mpi-train
#SBATCH --account=CHANGE_ME
#SBATCH --partition=CHANGE_ME
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --no-kill
#SBATCH --output=%x-%j.out

modules=()  # what `module load` gets: Python, MPI
# The others may also come from the environment: survive=1 sbatch ...
mpi=${mpi:-pmix}  # a plugin that `srun --mpi=list` names; without survive=1
survive=${survive:-0}
venv=${venv:-.venv-site}  # see jobs/slurm.sh
text=${text:-data/new_testament.txt}
folder=${folder:-results/training}  # folder of checkpoints, which all nodes see
options=${options:---preset tiny --positions rotary --seqlen 1024 --steps 1000}

((${#modules[@]} == 0)) || module load "${modules[@]}" || exit
set -euo pipefail
source "$venv/bin/activate"
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK OPENBLAS_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

read -ra more <<<"$options"
command=(python drivers/train_gpt.py "$text" --folder "$folder" --resume "${more[@]}")
if [[ $survive == 1 ]]; then
  # Ranks of srun do not learn that a rank died.  Open MPI's launcher tells them, so srun starts its
  # daemons.
  export SLURM_KILL_BAD_EXIT=0
  mpiexec --with-ft ulfm -n "$SLURM_NTASKS" --map-by "ppr:$SLURM_NTASKS_PER_NODE:node" \
    "${command[@]}" --survive
else
  srun --mpi="$mpi" --kill-on-bad-exit=1 "${command[@]}"
fi
