#!/usr/bin/env bash
# Replay plans of up to thousands of ranks on networks, by SimGrid.  The options are those that
# drivers/simulate.py takes.
#
#   bash jobs/simulate.sh --output results/scale.h5 --profile data/machines/a100-16x4.toml \
#       --networks "switch,fat tree:2" --ranks 64,256 --backward --plans "ring,auto:each" --resume
#
# This needs SimGrid's library and a compiler: apt-get install g++ libsimgrid-dev (Debian, Ubuntu).
# Python needs no package of SimGrid: the replay is a C++ program, which is compiled at the start.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh

use_env any
python drivers/simulate.py "$@"
