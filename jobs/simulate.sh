#!/usr/bin/env bash
# Plans replayed on networks by SimGrid, to thousands of ranks; the options of drivers/simulate.py.
#
#   bash jobs/simulate.sh --output results/scale.h5 --profile data/machines/a100-16x4.toml \
#       --networks "switch,fat tree:2" --ranks 64,256 --backward --plans "ring,auto:each" --resume
#
# It needs SimGrid's library and a compiler: apt-get install g++ libsimgrid-dev (Debian, Ubuntu).
# Python needs nothing of SimGrid: the replay is a program of its own, made at the start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh

use_env any
python drivers/simulate.py "$@"
