"""check_result.py FILE HOSTS RANKS: is it a result of so many, with all checks passed?"""

import sys

from a2d_mpi.experiments.results import read_result

path, hosts, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
result = read_result(path)
names = result.provenance["hostnames"]
assert set(names) == {f"node{i:02d}" for i in range(hosts)}, names
for name, seconds in result.timings.items():
    assert seconds.shape[1] == ranks, f"{name}: {seconds.shape[1]} ranks"
assert {"out", "lse", "dq", "dk", "dv", "traffic", "repeat"} <= set(result.checks), result.checks
for name, check in result.checks.items():
    assert check.passed, f"{name}: {check}"
