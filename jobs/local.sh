#!/usr/bin/env bash
# Run the main job on this machine: causal attention and its gradients on 4 ranks, on the committed
# sample.  All results are checked against float64.  The first run installs a2d_mpi and an MPI in
# .venv.  The driver gets further options:
#
#   bash jobs/local.sh --method ring --output results/ring.h5
#
# Paths are relative to the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh

use_env any
mkdir -p results
run_mpi 4 600 python drivers/attention.py data/minilm_l3_1536.h5 \
  --rows 2 --cols 2 --mask causal --backward --check full --trials 5 \
  --output results/local.h5 "$@"
