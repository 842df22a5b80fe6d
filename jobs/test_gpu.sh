#!/usr/bin/env bash
# The tests on the GPUs of this machine: the kernels, then all methods on 1, 4 and 6 ranks that share
# them.  Sized for ten minutes, which no GPU has confirmed yet.  What follows goes to pytest.
exec bash "$(dirname "${BASH_SOURCE[0]}")/test.sh" gpu "$@"
