#!/usr/bin/env bash
# Run the tests on the GPUs of this machine: the kernels, then all methods on 1, 4 and 6 ranks that
# share the GPUs.  They should take ten minutes, but have not run on a GPU yet.  Options go to pytest.
exec bash "$(dirname "${BASH_SOURCE[0]}")/test.sh" gpu "$@"
