#!/usr/bin/env bash
# The pages of docs/, and the public names, as HTML in build/docs; warnings are errors.
#
#   bash jobs/docs.sh      then open build/docs/index.html
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh

use_env any docs .venv-docs docs
python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
echo "written to build/docs/index.html"
