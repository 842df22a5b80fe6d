#!/usr/bin/env bash
# Figures for GPUs, on this machine: kernels against PyTorch's (if it is installed
# in .venv-gpu), 4 ranks against 1 on the same GPU, and the rate of MPI between device buffers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh
source jobs/gpu.sh

use_gpu
run_mpi 1 600 python drivers/bench_gpu.py kernel "$@"
with_mps run_mpi 4 600 python drivers/bench_gpu.py split
run_mpi 4 300 python drivers/bench_gpu.py transfers
