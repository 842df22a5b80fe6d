"""What slices of the heads save, and what each refinement of a schedule saves beside them.

    bash jobs/emulate.sh 16 1 100mbit -- python tests/tools/refinements.py 4x4x1 8192 3 1,2,4
    bash jobs/emulate.sh 16 1 10mbit -- python tests/tools/refinements.py 4x4x1 2048 5 1,4 all

They take the grid, R x C x U, and the numbers of tokens, trials and slices.  Causal mask,
8 heads of 64 for each rank of the head axis; medians over the trials of the slowest rank, in
seconds; the variants take turns.  The second column of seconds is divided by those of the first
number of slices.  With `all`, the other columns say how much slower the same plan is without a
refinement (a negative number: how much faster).
"""

import sys
import time
from contextlib import ExitStack
from itertools import product
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, ProcessGrid
from a2d_mpi.schedules.attention2d import gradients_by_query

SCHEDULES = "a2d_mpi.schedules"
# What replaces a refinement.
WITHOUT = {
    "two chunks": {"attention2d.chunked": lambda places, ranks: [places] if places else []},
    "larger reduction first": {
        "attention2d.gradients_by_query": lambda group: not gradients_by_query(group)
    },
}
HEADS, HEADDIM = 8, 64


def without(name: str) -> ExitStack:
    """Leave out a refinement in a ``with`` statement; "all": leave out none."""
    stack = ExitStack()
    for place, new in WITHOUT.get(name, {}).items():
        stack.enter_context(patch(f"{SCHEDULES}.{place}", new))
    return stack


def main(shape: str, seqlen: str, trials: str, slices: str, others: str = "") -> None:
    """Print a line for each phase and number of slices."""
    comm, numbers = MPI.COMM_WORLD, list(map(int, slices.split(",")))
    names = list(WITHOUT) if others == "all" else []
    rows, cols, heads = map(int, shape.split("x"))
    grid = ProcessGrid(comm, rows, cols, heads)
    seconds = measured(grid, int(seqlen), int(trials), list(product(numbers, ["all", *names])))
    if comm.rank:
        return
    print(
        f"{shape}, {seqlen} tokens\nphase    slices  seconds  over"
        + "".join(f"{x:>24}" for x in names)
    )
    for phase, number in product(("forward", "backward"), numbers):
        t, first = seconds[number, "all", phase], seconds[numbers[0], "all", phase]
        slower = "".join(f"{seconds[number, x, phase] / t - 1:24.1%}" for x in names)
        print(f"{phase:<9}{number:6}{t:9.3f}{t / first:6.2f}{slower}", flush=True)


def measured(
    grid: ProcessGrid, seqlen: int, trials: int, variants: list[tuple[int, str]]
) -> dict[tuple[int, str, str], float]:
    """Return median seconds of the slowest rank, by slices, refinement left out, and phase."""
    plans = {}
    for number, name in variants:
        with without(name):
            sizes = {"seqlen": seqlen, "nheads": HEADS * grid.heads, "headdim": HEADDIM}
            plans[number, name] = Attention2D(grid, Causal(), slices=number, **sizes)
    rng = np.random.default_rng(grid.comm.rank)
    shape = len(plans[variants[0]].tokens), HEADS * grid.heads, HEADDIM
    q, k, v, dout = (rng.standard_normal(shape, np.float32) for _ in range(4))
    found: dict[tuple[int, str, str], list[float]] = {}
    for trial in range(trials + 1):  # the first one warms up
        for key, plan in plans.items():
            for phase in ("forward", "backward"):
                grid.comm.Barrier()
                start = time.perf_counter()
                if phase == "forward":
                    out, lse = plan.forward(q, k, v)
                else:
                    plan.backward(dout, q, k, v, out, lse)
                slowest = grid.comm.allreduce(time.perf_counter() - start, MPI.MAX)
                if trial:
                    found.setdefault((*key, phase), []).append(slowest)
    return {key: float(np.median(x)) for key, x in found.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
