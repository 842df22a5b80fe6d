#!/usr/bin/env bash
# Find out whether a change of the code made it slower.  Some plans run with another commit (in a
# worktree of its own) and with the files here, in turn, on this machine or on an emulated cluster
# (see jobs/emulate.sh).  The job prints medians of the launches' medians, and their ratio.
#
#   bash jobs/speed.sh COMMIT local   README's example on 4 ranks, and tiny calls on 2
#   bash jobs/speed.sh COMMIT 16x1    768 tokens on 16 nodes, 10 Mbit/s
#   bash jobs/speed.sh COMMIT 64x1    the same on 64 nodes, 2.5 Mbit/s
#   bash jobs/speed.sh COMMIT 16x4    768 tokens on 16 nodes of 4 ranks, 10 Mbit/s: the node-aware grid
#
# Environment variable: LAUNCHES=7, the number of launches of each commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh

[[ $# == 2 && $2 =~ ^(local|16x1|64x1|16x4)$ ]] || { echo "usage: speed.sh COMMIT local|16x1|64x1|16x4" >&2 && exit 2; }
use_env any pytest
checkout_then "$1"
for ((i = 0; i < ${LAUNCHES:-7}; i++)); do
  for tree in then now; do
    path=$PWD
    if [[ $tree == then ]]; then path=$folder/then; fi
    export PYTHONPATH=$path/src
    case $2 in
      local)
        run_mpi 4 300 python tests/speed.py "$folder/$tree.a$i.json" 1536,12,32 9 \
          attention2d:2x2x1 ring:4x1x1
        run_mpi 2 300 python tests/speed.py "$folder/$tree.b$i.json" 24,2,8 500 attention2d:2x1x1
        ;;
      16x1)
        bash jobs/emulate.sh 16 1 10mbit -- python tests/speed.py "$folder/$tree.$i.json" \
          768,16,16 3 attention2d:1x1x16 attention2d:4x4x1 ring:16x1x1
        ;;
      64x1)
        bash jobs/emulate.sh 64 1 2.5mbit -- python tests/speed.py "$folder/$tree.$i.json" \
          768,16,16 1 attention2d:2x2x16 attention2d:8x8x1 ring:64x1x1
        ;;
      16x4)
        bash jobs/emulate.sh 16 4 10mbit -- python tests/speed.py "$folder/$tree.$i.json" \
          768,16,16 1 attention2d:8x8x1 node_aware:4x16x1 node_aware:8x8x1:2x2
        ;;
    esac 2>"$folder/log" || { cat "$folder/log" >&2 && exit 1; } # print the log of the failed launch, and stop
  done
done
python - "$folder" <<'EOF'
import json
import sys
from pathlib import Path
from statistics import median

seconds = {}
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    for name, x in json.loads(path.read_text()).items():
        seconds.setdefault(name, {}).setdefault(path.name.split(".")[0], []).append(x)
for name, trees in seconds.items():
    then, now = (sorted(trees[x]) for x in ("then", "now"))
    print(f"{name:<28} then {median(then):.4g} s ({then[0]:.4g} to {then[-1]:.4g}), "
          f"now {median(now):.4g} s ({now[0]:.4g} to {now[-1]:.4g}): "
          f"{median(now) / median(then) - 1:+.1%}")
EOF
