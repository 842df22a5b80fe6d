"""What each refinement of Attention2D's schedule saves, and how much transfer is exposed.

    bash jobs/emulate.sh 2 1 600mbit -- python tests/refinements.py 8192 5

On every grid of all ranks, causal mask, 8 heads of 64: medians over the trials of the slowest
rank, in seconds; the variants take turns.  `compute` is the time of kernels and merges without
overlap, when no message is under way.  `exposed` is the share of the transfers that overlap does
not hide: (time - compute) / (time without overlap - compute).  The other columns say how much
slower the same plan is without a refinement.
"""

import sys
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, ProcessGrid
from a2d_mpi.schedules.attention2d import gradients_by_query

SCHEDULES = "a2d_mpi.schedules"
# The functions that replace a refinement.
WITHOUT = {
    "two chunks": {"group.chunks": lambda tokens, ranks: [slice(0, tokens)]},
    "own work last": {"program.splits_own_shard": lambda tokens, ranks: False},
    "larger reduction first": {
        "attention2d.gradients_by_query": lambda *sizes: not gradients_by_query(*sizes)
    },
}
HEADS, HEADDIM = 8, 64


def main(seqlen: int, trials: int) -> None:
    """Print a line for each grid and phase."""
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        print("grid  phase       time  compute  exposed" + "".join(f"{x:>24}" for x in WITHOUT))
    for rows in (x for x in range(1, comm.size + 1) if comm.size % x == 0):
        grid = ProcessGrid(comm, rows, comm.size // rows)
        seconds, compute = measured(grid, seqlen, trials)
        for phase in ("forward", "backward"):
            time, alone = seconds["all", phase], seconds["no overlap", phase]
            busy = compute[phase]
            exposed = (time - busy) / max(alone - busy, 1e-9)
            slower = "".join(f"{seconds[x, phase] / time - 1:24.1%}" for x in WITHOUT)
            if comm.rank == 0:
                print(
                    f"{rows}x{grid.cols:<4}{phase:<9}{time:7.3f}{busy:9.3f}{exposed:9.0%}{slower}"
                )
        grid.free()


def measured(grid: ProcessGrid, seqlen: int, trials: int) -> tuple[dict, dict]:
    """Median seconds by variant and phase, and those of kernels and merges without overlap."""
    plans = {}
    for name in ("all", "no overlap", *WITHOUT):
        with ExitStack() as stack:
            for place, function in WITHOUT.get(name, {}).items():
                stack.enter_context(patch(f"{SCHEDULES}.{place}", function))
            sizes = {"seqlen": seqlen, "nheads": HEADS, "headdim": HEADDIM}
            plans[name] = Attention2D(grid, Causal(), overlap=name != "no overlap", **sizes)
    rng = np.random.default_rng(grid.comm.rank)
    shape = len(plans["all"].tokens), HEADS, HEADDIM
    q, k, v, dout = (rng.standard_normal(shape, np.float32) for _ in range(4))
    found: dict[tuple[str, str], list[float]] = {}
    for trial in range(trials + 1):  # the first one warms up
        for name, plan in plans.items():
            out, lse = plan.forward(q, k, v)
            plan.backward(dout, q, k, v, out, lse)
            for phase in ("forward", "backward") if trial else ():
                parts = plan.timings
                busy = parts[f"{phase}/compute"] + parts[f"{phase}/merge"]
                both = np.array([parts[f"{phase}/total"], busy])
                grid.comm.Allreduce(MPI.IN_PLACE, both, MPI.MAX)
                found.setdefault((name, phase), []).append(both)
    for plan in plans.values():
        plan.free()
    median = {key: np.median(x, axis=0) for key, x in found.items()}
    seconds = {key: float(total) for key, (total, _) in median.items()}
    return seconds, {phase: float(median["no overlap", phase][1]) for _, phase in median}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
