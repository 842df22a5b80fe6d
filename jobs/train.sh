#!/usr/bin/env bash
# Train the GPT `tiny` on 2 x 2 ranks on the King James Version's New Testament, generate some text
# with it and draw the loss.  This takes a quarter of an hour on two busy cores.  A run that was
# stopped at any time continues.  The training gets further options:
#
#   bash jobs/train.sh results/training
#   bash jobs/train.sh results/short --steps 100
#
# Paths are relative to the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh

output=${1:-results/training}
use_env any plot
mkdir -p "$output"
run_mpi 4 3600 python drivers/train_gpt.py data/new_testament.txt --preset tiny \
  --positions rotary --seqlen 1024 --rate 4e-3 --warmup-steps 50 --steps 1000 --validate 0.05 \
  --rows 2 --cols 2 --folder "$output/checkpoints" --resume --output "$output/training.h5" "${@:2}"
run_mpi 4 600 python drivers/generate.py "$output/checkpoints" --rows 2 --cols 2 --tokens 300 \
  --temperature 0.5 --prompt "And Jesus said unto them, "
python drivers/plot.py results "$output/training.h5" --what training --output "$output" --format png
