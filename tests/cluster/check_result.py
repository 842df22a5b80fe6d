"""check_result.py FILE HOSTS RANKS: is it a result of so many, with all checks passed?"""

import sys

from a2d_mpi.results.hdf5 import RESULT_SCHEMA, flat, read_file

path, hosts, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
result = read_file(path, RESULT_SCHEMA)
names, checks = result["origin"]["hostnames"], result["checks"]
assert set(names) == {f"node{i:02d}" for i in range(hosts)}, names
for name, seconds in flat(result["timings"]).items():
    assert seconds.shape[1] == ranks, f"{name}: {seconds.shape[1]} ranks"
assert {"out", "lse", "dq", "dk", "dv", "traffic", "repeat"} <= checks.keys(), checks
for name, check in checks.items():
    assert check["passed"], f"{name}: {check}"
