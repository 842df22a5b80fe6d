"""The table of drivers/bench_overlap.py."""

from __future__ import annotations

import argparse

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.attention.methods import Attention2D
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.transport import PROGRESS
from a2d_mpi.core.masks import MASKS
from a2d_mpi.experiments.measure import Measurement, random_inputs
from a2d_mpi.experiments.timing import turns


def bench_overlap(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Print a line for each grid of one row or column, and phase; returns the exit code."""
    if comm.rank == 0:
        print("grid  pass      compute transfer |    off" + "".join(f"{x:>8}" for x in PROGRESS)
              + "   best/compute  hidden")  # fmt: skip
    for rows in dict.fromkeys((1, comm.size)):
        grid = ProcessGrid(comm, rows, comm.size // rows)
        with threadpool_limits(1):
            runs = _measured(grid, args)
        for phase in ("forward", "backward"):
            variants = {x: _median(run, f"{phase}/total") for x, run in runs.items()}
            busy = _median(runs["off"], f"{phase}/compute", f"{phase}/merge")
            off = variants.pop("off")
            best = min(variants.values())
            transfer = off - busy
            hidden = (off - best) / max(min(busy, transfer), 1e-9)
            if comm.rank == 0:
                print(
                    f"{grid.rows}x{grid.cols:<3} {phase:<9}{busy:8.3f}{transfer:9.3f} |{off:7.3f}"
                    + "".join(f"{x:8.3f}" for x in variants.values())
                    + f"{best / busy:15.2f}{hidden:8.0%}",
                    flush=True,
                )
        for run in runs.values():
            run.plan.free()
        grid.free()
    return 0


def _measured(grid: ProcessGrid, args: argparse.Namespace) -> dict[str, Measurement]:
    """All trials of every variant."""
    runs = {}
    for name in ("off", *PROGRESS):
        sizes = {x: getattr(args, x) for x in ("seqlen", "nheads", "headdim")}
        overlap = False if name == "off" else name
        plan = Attention2D(grid, MASKS[args.mask](), overlap=overlap, threads=1, **sizes)
        runs[name] = Measurement(plan, random_inputs(plan, True), backward=True)
        runs[name].call()  # warms up
    for run in turns(list(runs.values()), args.trials):
        run.trial()
    return runs


def _median(run: Measurement, *names: str) -> float:
    """Seconds of the slowest rank in a median trial, of several parts together."""
    trials = np.sum([run.seconds[name] for name in names], axis=0)
    slowest = np.empty_like(trials)
    run.plan.grid.comm.Allreduce(trials, slowest, MPI.MAX)
    return float(np.median(slowest))
