"""What slices of the heads save, and what each refinement of a schedule saves beside them.

    bash jobs/emulate.sh 16 1 100mbit -- python tests/tools/refinements.py 4x4x1 8192 3 1,2,4
    bash jobs/emulate.sh 16 1 10mbit -- python tests/tools/refinements.py 4x4x1 2048 5 1,4 all
    python tests/tools/refinements.py

The first two take the grid, R x C x U, and the numbers of tokens, trials and slices.  Causal mask,
8 heads of 64 for each rank of the head axis; medians over the trials of the slowest rank, in
seconds; the variants take turns.  The second column of seconds is divided by those of the first
number of slices.  With `all`, the other columns say how much slower the same plan is without a
refinement (a negative number: how much faster).  Without arguments: the same in the simulator, for
H100 and A100.
"""

import sys
import time
from contextlib import ExitStack
from itertools import product
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, Full, ProcessGrid
from a2d_mpi.core.layout import Layout
from a2d_mpi.planning import survey
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.attention2d import gradients_by_query

SCHEDULES = "a2d_mpi.schedules"
# What replaces a refinement.
WITHOUT = {
    "two chunks": {"line.chunked": lambda places, ranks: [places] if places else []},
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


def simulated() -> None:
    """Print the same in the simulator, with seconds over those of one slice."""
    names = list(WITHOUT)
    print(f"{'':<46}slices  phase      over" + "".join(f"{x:>24}" for x in names))
    cases = product(
        ("h100-64x1", "a100-16x4"), (Full(), Causal()), (8, 2), ((4, 4), (2, 8)), (15, 17)
    )
    gains: dict[tuple[int, str], list[float]] = {}
    for profile, mask, nheads_kv, shape, exponent in cases:
        machine = read_machine(f"data/machines/{profile}.toml")
        job = Workload(1 << exponent, 8, 128, nheads_kv, mask=mask, backward=True)
        seconds = {}
        for number, name in product((1, 2, 4), ("all", *names)):
            with without(name):
                survey._survey.cache_clear()
                survey._tape.cache_clear()
                layout = Layout(*shape, slices=(number, number))
                for phase, x in predict(machine, "attention2d", layout, job).items():
                    seconds[number, name, phase] = float(x.total.max())
        case = f"{profile} {type(mask).__name__} {nheads_kv} KV heads, {shape}, {1 << exponent}"
        for number, phase in product((1, 2, 4), ("forward", "backward")):
            t = seconds[number, "all", phase]
            ratios = [seconds[number, x, phase] / t - 1 for x in names]
            for x, ratio in zip(names, ratios):
                gains.setdefault((number, x), []).append(ratio)
            over = t / seconds[1, "all", phase]
            print(
                f"{case:<46}{number:6}  {phase:<9}{over:6.2f}"
                + "".join(f"{x:24.1%}" for x in ratios)
            )
    for (number, name), found in gains.items():
        quartiles = ", ".join(f"{x:+.1%}" for x in np.quantile(found, (0.25, 0.5, 0.75, 1)))
        print(f"{number} slices, without {name}: quartiles and largest {quartiles}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        simulated()
