"""What each refinement of Attention2D's schedule saves, and how much transfer is exposed.

    bash jobs/emulate.sh 2 1 600mbit -- python tests/refinements.py 8192 5
    bash jobs/emulate.sh 16 1 10mbit -- python tests/refinements.py 2048 7 4

Arguments are the number of tokens and of trials and, if only one grid is wanted, its rows.

On every grid of all ranks, causal mask, 8 heads of 64: medians over the trials of the slowest
rank, in seconds; the variants take turns.  `compute` is the time of kernels and merges without
overlap, when no message is under way.  `exposed` is the share of the transfers that overlap does
not hide: (time - compute) / (time without overlap - compute).  The other columns say how much
slower the same plan is without a refinement, with the striped distribution, and under a full
mask (a negative number: how much faster).

    python tests/refinements.py

prints what gathers first saves in the simulator, forward.
"""

import sys
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, Full, ProcessGrid
from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning import survey
from a2d_mpi.planning.model import predict, slowest_seconds
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules.attention2d import gradients_by_query
from a2d_mpi.schedules.passes import PASSES, gathers_before_returns
from a2d_mpi.schedules.problem import Workload

SCHEDULES = "a2d_mpi.schedules"
# What replaces a refinement.
WITHOUT = {
    "two chunks": {"attention2d.chunked": lambda places, ranks: [places] if places else []},
    "own work last": {
        "attention2d.split_own": lambda g, rank, of_keys, *_, **__: [g.all_places(of_keys, rank)]
    },
    "larger reduction first": {
        "attention2d.gradients_by_query": lambda group: not gradients_by_query(group)
    },
    "gathers first": {"passes.PASSES": [x for x in PASSES if x is not gathers_before_returns]},
}
OTHERS = {"striped": (Causal(), "striped"), "full mask": (Full(), None)}
HEADS, HEADDIM = 8, 64


def main(seqlen: int, trials: int, rows: int | None = None) -> None:
    """Print a line for each grid and phase."""
    comm, names = MPI.COMM_WORLD, (*WITHOUT, *OTHERS)
    if comm.rank == 0:
        print("grid  phase       time  compute  exposed" + "".join(f"{x:>24}" for x in names))
    shapes = [x for x in range(1, comm.size + 1) if comm.size % x == 0]
    for r in shapes if rows is None else [rows]:
        grid = ProcessGrid(comm, r, comm.size // r)
        seconds, compute = measured(grid, seqlen, trials)
        for phase in ("forward", "backward"):
            time, alone = seconds["all", phase], seconds["no overlap", phase]
            busy = compute[phase]
            exposed = (time - busy) / max(alone - busy, 1e-9)
            slower = "".join(f"{seconds[x, phase] / time - 1:24.1%}" for x in names)
            if comm.rank == 0:
                print(
                    f"{r}x{grid.cols:<4}{phase:<9}{time:7.3f}{busy:9.3f}{exposed:9.0%}{slower}",
                    flush=True,
                )
        grid.free()


def measured(grid: ProcessGrid, seqlen: int, trials: int) -> tuple[dict, dict]:
    """Median seconds by variant and phase, and those of kernels and merges without overlap."""
    plans = {}
    for name in ("all", "no overlap", *WITHOUT, *OTHERS):
        mask, distribution = OTHERS.get(name, (Causal(), None))
        with ExitStack() as stack:
            for place, new in WITHOUT.get(name, {}).items():
                stack.enter_context(patch(f"{SCHEDULES}.{place}", new))
            sizes = {"seqlen": seqlen, "nheads": HEADS, "headdim": HEADDIM}
            options = {"overlap": name != "no overlap", "distribution": distribution}
            plans[name] = Attention2D(grid, mask, **options, **sizes)
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


def simulated() -> None:
    """Print by how much gathers first changes the simulated time of a forward pass."""
    for profile, seqlen, nheads, headdim, dtype in (
        ("results/16x1", 2048, 8, 64, "float32"),
        ("machines/h100-64x1", 1 << 15, 32, 128, "bfloat16"),
        ("machines/h100-64x1", 1 << 17, 32, 128, "bfloat16"),
        ("machines/a100-16x4", 1 << 15, 32, 128, "bfloat16"),
        ("machines/a100-16x4", 1 << 17, 32, 128, "bfloat16"),
    ):
        machine = read_machine(f"data/{profile}.toml")
        for rows, cols in ((4, 4), (2, 8), (8, 2)):
            gains = []
            window = f"sliding_window_causal:{seqlen // 8}"
            for text in ("causal", window, "causal_document:seed=3"):
                mask = make_mask(text, seqlen)
                job = Workload(seqlen, nheads, headdim, mask=mask, dtype=dtype)
                seconds = []
                for changes in ({}, WITHOUT["gathers first"]):
                    with ExitStack() as stack:
                        for place, new in changes.items():
                            stack.enter_context(patch(f"{SCHEDULES}.{place}", new))
                        survey._survey.cache_clear()
                        survey._tape.cache_clear()
                        phases = predict(machine, "attention2d", Layout(rows, cols), job)
                        seconds.append(slowest_seconds(phases))
                gains.append(f"{text.split(':')[0]} {seconds[0] / seconds[1] - 1:+.1%}")
            print(f"{profile}, {seqlen} tokens, {rows}x{cols}: {', '.join(gains)}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*map(int, sys.argv[1:]))
    else:
        simulated()
