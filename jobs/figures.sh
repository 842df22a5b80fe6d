#!/usr/bin/env bash
# Draw all figures of the documentation, from committed results and by the planner's model.
#
#   bash jobs/figures.sh data/figures
#
# The last command, crossover, simulates for a minute; all others take a minute together.
# tests/test_figures.py draws the figures, too, and compares their data with the committed figures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=${1:?usage: figures.sh FOLDER}
source jobs/env.sh
use_env any plot
mkdir -p "$output"/{partitions,scale}

python drivers/plot.py grid "$output"/grid.png --rows 2 --cols 3
python drivers/plot.py masks "$output"/masks.png --distribution balanced
python drivers/plot.py partitions --ranks 16 --seeds 0,1,2,3,4,5,6,7,8,9 \
  --output data/results/masks.csv --picture "$output"/mask_table.png
python drivers/plot.py schedule "$output"/schedules.png --plans "attention2d:4x4,ring,double ring:4x4" \
  --profile data/machines/a100-16x4.toml --ranks 16 --seqlen 32K --nheads 32 --nheads-kv 8 --mask causal
python drivers/plot.py schedule "$output"/slices.png --plans "attention2d:2x2*1,attention2d:2x2*4" \
  --profile data/machines/h100-64x1.toml --ranks 4 --seqlen 32K --nheads 8 --mask causal

# Draw partitions for problems for which the planner predicts them to be the fastest.
python drivers/plot.py schedule "$output"/partitions/triangle.png --plans triangle:10x1,attention2d:2x5 \
  --profile data/machines/h100-64x1.toml --ranks 10 --seqlen 48K --nheads 7 --mask causal
python drivers/plot.py schedule "$output"/partitions/node_aware.png \
  --plans "node aware:8x2@rcu/4x1,attention2d:4x4@cru" \
  --profile data/machines/a100-4-1nic.toml --ranks 16 --seqlen 32K --nheads 9 --mask full
python drivers/plot.py schedule "$output"/partitions/heads.png --plans attention2d:1x1x12,attention2d:4x3@cru \
  --profile data/machines/a100-4-1nic.toml --ranks 12 --seqlen 24K --nheads 24 --mask full

python drivers/plot.py results data/results/tiles.h5 --output "$output" --what kernels --format png
python drivers/plot.py results data/results/trace.json --output "$output" --what trace --format png
python drivers/plot.py results data/results/scale/scale.h5 --output "$output"/scale --what winners --format png
python drivers/plot.py results data/results/scale/links.h5 --output "$output"/scale --what slopes --format png
python drivers/plot.py results data/results/crossover --output "$output" --what crossover --format png
