#!/usr/bin/env bash
# Measure on the GPUs of this machine: kernels against PyTorch's (if it is installed in .venv-gpu), 4
# ranks against 1 on the same GPU, and the rate of MPI between device buffers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh
source jobs/gpu.sh

use_gpu
run_mpi 1 600 python drivers/bench_kernel.py --device gpu "$@"
mkdir -p results
plan=(python drivers/bench.py --output "results/gpu-$(date -u +%Y%m%dT%H%M%S).h5" --resume)
plan+=(--device gpu --seqlens 16K --nheads 16 --headdim 128 --dtypes bfloat16 --backward)
with_mps run_mpi 4 600 "${plan[@]}" --plans attention2d
run_mpi 1 600 "${plan[@]}" --plans attention2d
run_mpi 4 300 python tests/gpu_transfers.py
