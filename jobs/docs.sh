#!/usr/bin/env bash
# Build the pages of docs/ and of the public names as HTML in build/docs.  Warnings are errors.
#
#   bash jobs/docs.sh      then open build/docs/index.html
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/env.sh

use_env any docs .venv-docs docs
python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
echo "written to build/docs/index.html"
