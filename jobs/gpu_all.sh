#!/usr/bin/env bash
# Run everything on the GPU of this machine, in about nine minutes once the environment exists:
#
# * whether cuDNN is found, and whether MPI takes device memory (otherwise it gets host memory);
# * the main job on 1 and 4 ranks, and a plan on 4 ranks, with overlap and in turn, against 1 rank,
#   with timelines;
# * kernels against PyTorch's, if torch is installed: few KV heads, small blocks, a window, packed
#   documents;
# * the rate of MPI between device buffers and through the host;
# * the tests for GPUs.
#
#   bash jobs/gpu_all.sh [FOLDER [PARTS]]     default: results/gpu-<time>, all parts
#
# PARTS is a bash pattern of names of parts: 'tests*' runs the tests, '!(tests*)' all other parts.
# FOLDER then has gpu.txt with all output and gpu.h5 with all measurements.  drivers/plot.py results
# draws gpu.h5 (--what kernels or phases) and main_4.json (--what trace).  Each part has a limit of seconds, and all parts
# together have A2D_MPI_GPU_SECONDS (520).  If a part fails, the other parts run, the last lines name
# the part, and the exit code is 1.  With A2D_MPI_ENV=active only the wheels of A2D_MPI_WHEELS are
# installed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
source jobs/env.sh
source jobs/gpu.sh

use_gpu pytest,pytest_mpi,hypothesis test || exit
folder=${1:-results/gpu-$(date -u +%Y%m%dT%H%M%S)}
[[ ! -e $folder/gpu.h5 ]] || { echo "gpu_all.sh: $folder/gpu.h5 exists" >&2 && exit 2; }
mkdir -p "$folder" || exit
export A2D_TEST_GPU=1 # a GPU that is not found is a failure
ip link set lo up 2>/dev/null || true # it may be down in a virtual machine, and MPI needs it
# Report waiting ranks before the time of their part is over.
export A2D_MPI_STALL_SECONDS=${A2D_MPI_STALL_SECONDS:-15}
export A2D_TEST_RESULTS=$folder/.tests
mkdir -p "$A2D_TEST_RESULTS" || exit
output=(--output "$folder/gpu.h5") lines=() failed=0 parts=${2:-*}
SECONDS=0 most=${A2D_MPI_GPU_SECONDS:-520}

# wanted NAME: tell whether to run a part.  "device buffers" always runs, because other parts depend
# on what it finds.
wanted() {
  # shellcheck disable=SC2053
  [[ $1 == $parts || $1 == "device buffers" ]]
}

# part NAME SECONDS RANKS COMMAND...: run a part as run_mpi does; with 0 ranks, without mpiexec.
part() {
  local name=$1 seconds=$2 ranks=$3 start=$SECONDS status=0
  shift 3
  wanted "$name" || return 0
  if ((seconds > most - SECONDS)); then seconds=$((most - SECONDS)); fi
  printf '\n=== %s: %s\n' "$name" "$*"
  if ((seconds <= 0)); then
    status=124 seconds=0
  elif ((ranks == 0)); then
    limited "$seconds" "$@" || status=$?
  else
    run_mpi "$ranks" "$seconds" "$@" || status=$?
  fi
  case $status in
    0) lines+=("$name: passed, $((SECONDS - start)) s") ;;
    124 | 137) lines+=("$name: FAILED, out of time ($seconds s)") ;;
    *) lines+=("$name: FAILED, exit code $status, $((SECONDS - start)) s") ;;
  esac
  ((status == 0)) || failed=1
}

main() {
  local ranks=$1 grid=$2
  part "main job on $ranks" 50 "$ranks" python drivers/attention.py data/minilm_l3_1536.h5 \
    --device gpu --rows "$grid" --cols "$grid" --mask causal --backward --dtype bfloat16 \
    --check full --trials 5 --output "$folder/main_$ranks.h5" --trace "$folder/main_$ranks.json"
}

# If cuDNN is missing, `auto` is the plain kernel, and nothing else reports this.
cudnn='import cudnn
print("cuDNN", cudnn.backend_version(), "frontend", cudnn.__version__)
'

# Check the received data: a UCX that does not take device memory only prints a warning.
exchange='import cupy
from mpi4py import MPI

comm = MPI.COMM_WORLD
other = 1 - comm.rank
for n in 1 << 8, 1 << 22:
    sent, received = cupy.full(n, comm.rank, cupy.float32), cupy.empty(n, cupy.float32)
    cupy.cuda.get_current_stream().synchronize()
    comm.Sendrecv(sent, other, recvbuf=received, source=other)
    assert bool((received == other).all()), "MPI delivered something else"
'

# Collect all results in one file.
collect='
import sys
from pathlib import Path

import h5py

folder = Path(sys.argv[1])
for path in sorted(folder.glob("main_*.h5")):
    with h5py.File(folder / "gpu.h5", "a") as whole, h5py.File(path) as file:
        whole.copy(file["/"], f"main/{path.stem}")
    path.unlink()
'

# Bounds of 16 packed documents with 64K tokens.
documents=0,2777,3308,10009,13001,15422,24567,25344,31111,35000,42024,43333,50176,55007,58888,63019
documents+=,65536

everything() {
  date -u
  python --version
  nvidia-smi
  python -m pip list 2>/dev/null | grep -iE 'a2d|cupy|nvidia|cudnn|torch|mpi|ucx|numpy'
  part cuDNN 30 0 python -c "$cudnn"
  if [[ ${A2D_MPI_TRANSFERS:-} == device ]]; then
    local before=$failed
    failed=0
    part "device buffers" 30 2 python -c "$exchange"
    if ((failed)); then export A2D_MPI_TRANSFERS=host; fi # the other parts can still run
    failed=$((failed | before))
  fi
  # This part makes gpu.h5.
  local plan=(python drivers/bench.py "${output[@]}" --resume --device gpu --seqlens 16K)
  plan+=(--nheads 16 --headdim 128 --dtypes bfloat16 --backward --plans attention2d)
  if wanted "4 ranks"; then with_mps part "4 ranks" 90 4 "${plan[@]}" --overlap --no-overlap; fi
  part "1 rank" 50 1 "${plan[@]}"
  main 1 1
  main 4 2
  local kernel=(python drivers/bench.py kernels --device gpu "${output[@]}" --name)
  part kernels 70 0 "${kernel[@]}" kernels
  part "2 KV heads" 40 0 "${kernel[@]}" "2 KV heads" --nheads-kv 2
  part "8 KV heads" 80 0 "${kernel[@]}" "8 KV heads" --nheads-kv 8 --shapes 8192x64x128,16384x16x64
  part "small blocks" 70 0 "${kernel[@]}" "small blocks" \
    --shapes 1024x16x128,2048x16x128,4096x16x128,8192x16x128
  part "window and documents" 70 0 "${kernel[@]}" "window and documents" --shapes 65536x4x128 \
    --trials 5 --masks "full,sliding_window_causal:4096,causal_document:$documents"
  part transfers 30 4 python tests/gpu/gpu_transfers.py
  part "transfers through the host" 30 4 python tests/gpu/gpu_transfers.py host
  part "plain kernel" 40 0 "${kernel[@]}" "plain kernel" --kernels cupy --shapes 4096x16x128
  part "tests on 4 ranks" 150 4 \
    python -m pytest tests/gpu/test_device.py -q --color=no -k real --with-mpi -m mpi
  local tests=(python -m pytest -q --color=no -m "not mpi")
  part "tests of cuDNN" 250 0 "${tests[@]}" tests/gpu/test_cudnn.py -k "real and not partials"
  if limited 10 python -c 'import sys, importlib.util as x; sys.exit(not x.find_spec("torch"))'; then
    part "tests of PyTorch" 90 4 \
      python -m pytest tests/torch/test_torch.py -q --color=no -k real --with-mpi -m mpi
  else
    lines+=("tests of PyTorch: it is not installed")
  fi
  part "tests of the plain kernel" 120 0 "${tests[@]}" tests/gpu/test_gpu_kernels.py -k real
  part "tests of partial gradients" 60 0 "${tests[@]}" -rA tests/gpu/test_cudnn.py -k "real and partials"
  limited 10 python -c "$collect" "$folder" || { lines+=("collecting: FAILED") && failed=1; }
  printf '\n'
  printf '%s\n' "${lines[@]}"
  echo "$SECONDS s; read $folder/gpu.txt and $folder/gpu.h5"
  return "$failed"
}

everything 2>&1 | tee "$folder/gpu.txt"
status=${PIPESTATUS[0]}
rm -rf "$A2D_TEST_RESULTS"
exit "$status"
