"""CPU seconds of the planner on machines, ranks and workloads: docs/planning.md has their range.

python tests/tools/plan_times.py 64 1024
"""

import sys
import time
from itertools import product
from pathlib import Path

from a2d_mpi import Causal, Full
from a2d_mpi.planning.planner import candidates
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload

MACHINES = Path(__file__).parents[2] / "data" / "machines"


def main(*sizes):
    print("machine      ranks  tokens  mask    KV heads  CPU s  plans  simulated  pick")
    machines, masks = ("h100-8", "a100-16x4"), (Causal(), Full())
    cases = product(map(int, sizes), machines, (64, 1024), masks, (32, 8))
    for ranks, name, tokens, mask, nheads_kv in cases:
        machine = read_machine(MACHINES / f"{name}.toml")
        work = Workload(tokens << 10, 32, 128, nheads_kv, mask=mask, backward=True)
        start = time.process_time()
        found = candidates(machine, ranks, work)
        seconds, best = time.process_time() - start, found[0]
        layout = f"{best.layout.rows}x{best.layout.cols}x{best.layout.heads}"
        print(
            f"{name:12} {ranks:5} {tokens:6}K  {type(mask).__name__:7} {nheads_kv:8} "
            f"{seconds:6.1f} "
            f"{len(found):6} {sum(bool(x.phases) for x in found):10}  {best.method} {layout} "
            f"{best.layout.numbering}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
