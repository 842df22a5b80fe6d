#!/usr/bin/env bash
# Run the main job on the GPUs of this machine, which its 4 ranks share: causal attention and its
# gradients on the committed sample, checked against float64.  MPI gets device memory.  The driver
# gets further options:
#
#   bash jobs/gpu_local.sh --dtype float32 --transfers host
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh
source jobs/gpu.sh

use_gpu
mkdir -p results
run_mpi 4 600 python drivers/attention.py data/minilm_l3_1536.h5 --device gpu \
  --rows 2 --cols 2 --mask causal --backward --dtype bfloat16 --check full --trials 5 \
  --output results/gpu_local.h5 "$@"
