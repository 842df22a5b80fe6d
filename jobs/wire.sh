#!/usr/bin/env bash
# Make the measurements of docs/wire.md: errors of each format on 2 x 2 ranks, and seconds on 16
# emulated nodes.
#
#   bash jobs/wire.sh FOLDER errors     real activations, and the same with logits of 50; a minute
#   bash jobs/wire.sh FOLDER seconds    needs root, see docs/benchmarks.md; five minutes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
(($# == 2)) && [[ $2 == errors || $2 == seconds ]] || {
  grep '^#   ' "${BASH_SOURCE[0]}" >&2
  exit 2
}
folder=$1
mkdir -p "$folder"
source jobs/env.sh
use_env any

sample=data/minilm_l3_1536.h5
if [[ $2 == errors ]]; then
  large=$folder/logits50.h5
  # Multiply q by a number, so that the largest causal logit is 50.
  python - "$sample" "$large" << 'END'
import sys

import h5py
import numpy as np

with h5py.File(sys.argv[1]) as given, h5py.File(sys.argv[2], "w") as to:
    to.attrs.update(given.attrs)
    q, k = (given[x][:].astype("f4") for x in "qk")
    logits = np.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    to["q"] = q * (50 / np.abs(np.tril(logits)).max())
    to["k"], to["v"] = k, given["v"][:].astype("f4")
END
  for wire in "" bfloat16 mxfp8 mxfp4; do
    for input in "$sample" "$large"; do
      name=$([[ $input == "$sample" ]] && echo sample || echo logits50)
      run_mpi 4 300 python drivers/attention.py "$input" --rows 2 --cols 2 --backward \
        --check full --trials 1 ${wire:+--wire "$wire"} --output "$folder/$name-${wire:-none}.h5"
    done
  done
else
  bash jobs/emulate.sh 16 1 10mbit -- python drivers/bench.py --output "$folder/16x1.h5" --resume \
    --plans attention2d:4x4,ring --seqlens 2048 --nheads 8 --headdim 64 --masks full --backward \
    --wire none,bfloat16,mxfp8,mxfp4 --trials 3 --spans none
fi
