#!/usr/bin/env bash
# Run everything on the GPU of this machine, in calls of less than ten minutes each:
#
#   bash jobs/gpu_all.sh FOLDER first       main job on 1 and 4 ranks; rates of MPI on device buffers and
#                                           through the host
#   bash jobs/gpu_all.sh FOLDER figures     kernels beside PyTorch's by backend, if PyTorch is installed:
#                                           few KV heads, small blocks, a window, packed documents
#   bash jobs/gpu_all.sh FOLDER tests       tests on 4 ranks, of PyTorch and of the plain kernel
#   bash jobs/gpu_all.sh FOLDER cudnn       tests of cuDNN
#   bash jobs/gpu_all.sh FOLDER ranks       a grid and a ring: 1, 2 and 4 ranks on the GPU, with MPS and
#                                           without it, with overlap and in turn
#   bash jobs/gpu_all.sh [FOLDER]           all of them in one call, in 25 minutes
#
# Each call begins with the smoke test (tests/gpu/gpu_smoke.py): the ceilings of the GPU, and whether
# cuDNN computes at the speed of tensor cores.  If it fails, nothing else runs.  In place of a call's
# name, a bash pattern of names of parts can be given: '!(smoke)' runs all parts without that test.
#
# FOLDER (default: results/gpu-<time>) gets the output of each call as first.txt, ..., or as gpu.txt,
# and measurements: kernels.h5, ranks.h5, mps.h5 (4 ranks with MPS), main_1.h5 and main_4.h5, which
# drivers/plot.py results draws.  Each part has a limit of seconds, and all parts of a call together have
# A2D_MPI_GPU_SECONDS (520).  If a part fails, the other parts run, the last lines name it, and the exit
# code is 1.  It is 2 if there is no GPU.  With A2D_MPI_ENV=active only the wheels of A2D_MPI_WHEELS are
# installed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
source jobs/env.sh
source jobs/gpu.sh

most=520 name=${2:-gpu}
case ${2:-} in
  first) parts='@(smoke|main job*|transfers*)' ;;
  figures) parts='@(smoke|kernels|* KV heads|small blocks|window*|plain kernel)' ;;
  tests) parts='@(smoke|tests on*|tests of PyTorch|tests of the plain kernel)' ;;
  cudnn) parts='@(smoke|tests of cuDNN|tests of partial gradients)' ;;
  ranks) parts='@(smoke|? rank*)' ;;
  "") parts='*' most=$((5 * most)) ;;
  *) parts=$2 name=gpu ;;
esac
needs=""
if [[ "tests of cuDNN" == $parts || "tests on 4 ranks" == $parts ]]; then
  needs=pytest,pytest_mpi,hypothesis
fi
use_gpu "$needs" test || exit
folder=${1:-results/gpu-$(date -u +%Y%m%dT%H%M%S)}
[[ ! -e $folder/$name.txt ]] || { echo "gpu_all.sh: $folder/$name.txt exists" >&2 && exit 2; }
mkdir -p "$folder" || exit
export A2D_TEST_GPU=1 # a GPU that is not found is a failure
export PYTHONUNBUFFERED=1 # a part that is out of time keeps what it has printed
# Report waiting ranks before the time of their part is over.
export A2D_MPI_STALL_SECONDS=${A2D_MPI_STALL_SECONDS:-15}
export A2D_TEST_RESULTS=$folder/.tests
mkdir -p "$A2D_TEST_RESULTS" || exit
lines=() failed=0
SECONDS=0 most=${A2D_MPI_GPU_SECONDS:-$most}

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
  part "main job on $ranks" 80 "$ranks" python drivers/attention.py data/minilm_l3_1536.h5 \
    --device gpu --rows "$grid" --cols "$grid" --mask causal --backward --dtype bfloat16 \
    --check full --trials 5 --output "$folder/main_$ranks.h5" --trace "$folder/main_$ranks.json"
}

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

# Bounds of 16 packed documents with 64K tokens.
documents=0,2777,3308,10009,13001,15422,24567,25344,31111,35000,42024,43333,50176,55007,58888,63019
documents+=,65536

everything() {
  date -u
  python --version
  nvidia-smi
  python -m pip list 2>/dev/null | grep -iE 'a2d|cupy|nvidia|cudnn|torch|mpi|ucx|numpy'
  read_libraries
  part smoke 90 1 python tests/gpu/gpu_smoke.py
  if ((failed)); then
    echo "The smoke test failed, so nothing else was run.  What it says above must be mended first."
    return 1
  fi
  if [[ ${A2D_MPI_TRANSFERS:-} == device ]]; then
    part "device buffers" 30 2 python -c "$exchange"
    if ((failed)); then export A2D_MPI_TRANSFERS=host; fi # the other parts can still run
  fi
  main 1 1
  main 4 2
  part transfers 30 4 python tests/gpu/gpu_transfers.py
  part "transfers through the host" 30 4 python tests/gpu/gpu_transfers.py host
  local plan=(python drivers/bench.py --resume --device gpu --seqlens 16K --nheads 16 --headdim 128)
  plan+=(--dtypes bfloat16 --masks "full,causal" --backward --trials 5 --output)
  local rivals=(--plans "attention2d,ring" --overlap --no-overlap)
  part "1 rank" 80 1 "${plan[@]}" "$folder/ranks.h5" --plans attention2d
  part "2 ranks" 80 2 "${plan[@]}" "$folder/ranks.h5" --plans attention2d,ring
  part "4 ranks" 100 4 "${plan[@]}" "$folder/ranks.h5" "${rivals[@]}"
  if wanted "4 ranks with MPS"; then
    if start_mps; then
      part "4 ranks with MPS" 100 4 "${plan[@]}" "$folder/mps.h5" "${rivals[@]}"
      stop_mps
    else
      lines+=("4 ranks with MPS: it is not here")
    fi
  fi
  local kernel=(python drivers/bench.py kernels --device gpu --output "$folder/kernels.h5" --name)
  part kernels 70 0 "${kernel[@]}" kernels --torch default,cudnn,flash
  part "2 KV heads" 40 0 "${kernel[@]}" "2 KV heads" --nheads-kv 2
  part "8 KV heads" 120 0 "${kernel[@]}" "8 KV heads" --nheads-kv 8 --shapes 8192x64x128,16384x16x64
  part "small blocks" 60 0 "${kernel[@]}" "small blocks" \
    --shapes 1024x16x128,2048x16x128,4096x16x128,8192x16x128
  part "window and documents" 70 0 "${kernel[@]}" "window and documents" --shapes 65536x4x128 \
    --trials 5 --masks "full,sliding_window_causal:4096,causal_document:$documents"
  part "plain kernel" 40 0 "${kernel[@]}" "plain kernel" --kernels cupy --shapes 4096x16x128
  local tests=(python -m pytest -q --color=no -m "not mpi") on_ranks=(--with-mpi -m mpi)
  part "tests on 4 ranks" 150 4 \
    python -m pytest tests/gpu/test_device.py -q --color=no -k real "${on_ranks[@]}"
  if ! wanted "tests of PyTorch"; then
    :
  elif limited 10 python -c 'import sys, importlib.util as x; sys.exit(not x.find_spec("torch"))'; then
    part "tests of PyTorch" 90 4 \
      python -m pytest tests/torch/test_torch.py -q --color=no -k real "${on_ranks[@]}"
  else
    lines+=("tests of PyTorch: it is not installed")
  fi
  part "tests of the plain kernel" 120 0 "${tests[@]}" tests/gpu/test_gpu_kernels.py -k real
  part "tests of cuDNN" 250 0 "${tests[@]}" tests/gpu/test_cudnn.py -k "real and not partials"
  part "tests of partial gradients" 60 0 "${tests[@]}" -rA tests/gpu/test_cudnn.py \
    -k "real and partials"
  printf '\n'
  printf '%s\n' "${lines[@]}"
  echo "$SECONDS s; read $folder/$name.txt"
  return "$failed"
}

everything 2>&1 | tee "$folder/$name.txt"
status=${PIPESTATUS[0]}
rm -rf "$A2D_TEST_RESULTS"
exit "$status"
