#!/usr/bin/env bash
# Find out whether a change of the code changes results or messages.  About 220 configurations
# (tests/net.py) run on this machine, with another commit (in a worktree of its own) and with the
# files here.  The job lists each difference: bits of results, bytes, messages.  The exit code is 1 if
# there is a difference.
#
#   bash jobs/net.sh COMMIT
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh

(($# == 1)) || { echo "usage: net.sh COMMIT" >&2 && exit 2; }
use_env any pytest
checkout_then "$1"
PYTHONPATH="$folder/then/src${PYTHONPATH:+:$PYTHONPATH}" run_mpi 6 300 python tests/net.py "$folder/then.json"
PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" run_mpi 6 300 python tests/net.py "$folder/now.json"
python - "$folder/then.json" "$folder/now.json" <<'EOF'
import json
import sys

then, now = (json.load(open(path)) for path in sys.argv[1:])
off = [f"{name}: {kind}" for name in then for kind in then[name]
       if now.get(name, {}).get(kind) != then[name][kind]]
print("\n".join(off) or f"{len(then)} configurations: the same bits, bytes and messages")
sys.exit(bool(off) or then.keys() != now.keys())
EOF
