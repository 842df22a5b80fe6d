#!/usr/bin/env bash
# Everything on the GPU of this machine, in less than nine minutes once the environment is there:
# whether cuDNN is found, and whether MPI takes device memory (else it gets that of the host), the
# main job on 1 and 4 ranks, a plan of 4 ranks against 1 and what the ranks do when, how much of the
# transfers is hidden, kernels against PyTorch's (if torch is installed), with few KV heads, in small
# blocks, with a window and packed documents, the rate of MPI between device buffers and through the
# host, tests.
#
#   bash jobs/gpu_all.sh [FOLDER [PARTS]]     default: results/gpu-<time>, all parts
#
# PARTS is a pattern of bash for the names of parts: 'tests*' for the tests, '!(tests*)' for the others.
# FOLDER then has gpu.txt, all that was printed, and gpu.h5, all figures, for drivers/plot.py results
# (--what kernels, timeline or phases).  Each part has its time, all together have
# A2D_MPI_GPU_SECONDS (520); one that fails is named at the end, the others run, and the exit code
# is 1.  Nothing is installed with A2D_MPI_ENV=active but the wheels of A2D_MPI_WHEELS.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
source jobs/env.sh
source jobs/gpu.sh

use_gpu pytest,pytest_mpi,hypothesis || exit
folder=${1:-results/gpu-$(date -u +%Y%m%dT%H%M%S)}
[[ ! -e $folder/gpu.h5 ]] || { echo "gpu_all.sh: $folder/gpu.h5 exists" >&2 && exit 2; }
mkdir -p "$folder" || exit
export A2D_TEST_GPU=1 # a GPU that is not found is a failure
ip link set lo up 2>/dev/null || true # a bare virtual machine's may be down, and MPI needs one
# By default ranks would say that they wait when their part has long ended.
export A2D_MPI_STALL_SECONDS=${A2D_MPI_STALL_SECONDS:-15}
export A2D_TEST_RESULTS=$folder/.tests
mkdir -p "$A2D_TEST_RESULTS" || exit
output=(--output "$folder/gpu.h5") lines=() failed=0 parts=${2:-*}
SECONDS=0 most=${A2D_MPI_GPU_SECONDS:-520}

# wanted NAME: whether to run this part.  The others depend on what "device buffers" finds.
wanted() {
  # shellcheck disable=SC2053
  [[ $1 == $parts || $1 == "device buffers" ]]
}

# part NAME SECONDS RANKS COMMAND...: as run_mpi; RANKS 0 without mpiexec.
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
    --check full --trials 5 --output "$folder/main_$ranks.h5"
}

# Without it `auto` is the plain kernel, and nothing else says so.
cudnn='import cudnn
print("cuDNN", cudnn.backend_version(), "frontend", cudnn.__version__)
'

# Whether MPI takes device memory: a UCX that cannot says so in a warning and goes on.
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

# What runs while MPS does.
shared() {
  part "4 ranks" 60 4 "$@"
  part "overlap on 4 ranks" 60 4 python tests/gpu_overlap.py
}

# One file of all.
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

# Where 16 packed documents of 64K tokens begin and end.
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
    if ((failed)); then export A2D_MPI_TRANSFERS=host; fi # the other parts still can
    failed=$((failed | before))
  fi
  # The first to make gpu.h5.
  local plan=(python drivers/bench.py "${output[@]}" --resume --device gpu --seqlens 16K)
  plan+=(--nheads 16 --headdim 128 --dtypes bfloat16 --backward --plans attention2d)
  if wanted "4 ranks" || wanted "overlap on 4 ranks"; then with_mps shared "${plan[@]}"; fi
  part "1 rank" 50 1 "${plan[@]}"
  main 1 1
  main 4 2
  local kernel=(python drivers/bench_kernel.py --device gpu "${output[@]}" --name)
  part kernels 70 0 "${kernel[@]}" kernels
  part "2 KV heads" 40 0 "${kernel[@]}" "2 KV heads" --nheads-kv 2
  part "8 KV heads" 80 0 "${kernel[@]}" "8 KV heads" --nheads-kv 8 --shapes 8192x64x128,16384x16x64
  part "small blocks" 70 0 "${kernel[@]}" "small blocks" \
    --shapes 1024x16x128,2048x16x128,4096x16x128,8192x16x128
  part "window and documents" 70 0 "${kernel[@]}" "window and documents" --shapes 65536x4x128 \
    --trials 5 --masks "full,sliding_window_causal:4096,causal_document:$documents"
  part transfers 30 4 python tests/gpu_transfers.py
  part "transfers through the host" 30 4 python tests/gpu_transfers.py host
  part "plain kernel" 40 0 "${kernel[@]}" "plain kernel" --kernels cupy --shapes 4096x16x128
  part "tests on 4 ranks" 150 4 \
    python -m pytest tests/test_device.py -q --color=no -k real --with-mpi -m mpi
  local tests=(python -m pytest -q --color=no -m "not mpi")
  part "tests of cuDNN" 250 0 "${tests[@]}" tests/test_cudnn.py -k "real and not partials"
  if limited 10 python -c 'import sys, importlib.util as x; sys.exit(not x.find_spec("torch"))'; then
    part "tests of PyTorch" 90 4 \
      python -m pytest tests/test_torch.py -q --color=no -k real --with-mpi -m mpi
  else
    lines+=("tests of PyTorch: it is not installed")
  fi
  part "tests of the plain kernel" 120 0 "${tests[@]}" tests/test_gpu_kernels.py -k real
  part "tests of partial gradients" 60 0 "${tests[@]}" -rA tests/test_cudnn.py -k "real and partials"
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
