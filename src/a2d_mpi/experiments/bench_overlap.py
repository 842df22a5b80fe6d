"""The tables of drivers/bench_overlap.py."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.attention.methods import Attention2D
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.transport import PROGRESS
from a2d_mpi.core.patterns import make_mask
from a2d_mpi.experiments.inputs import random_inputs
from a2d_mpi.experiments.measure import Measurement
from a2d_mpi.experiments.timing import turns
from a2d_mpi.schedules import attention2d, group, program

_by_query = attention2d.gradients_by_query
# Refinements of the schedules of Attention2D: the functions without each.
REFINEMENTS = {
    "all": {},
    "whole shards": {(group, "chunks"): lambda tokens, ranks: [slice(0, tokens)]},
    "own work first": {(program, "splits_own_shard"): lambda tokens, ranks: False},
    "other reduction": {(attention2d, "gradients_by_query"): lambda *x: not _by_query(*x)},
}


def bench_overlap(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Print a line for each grid of one row or column, and phase; returns the exit code."""
    variants = REFINEMENTS if args.refinements else PROGRESS
    if comm.rank == 0:
        head = "" if args.refinements else "compute transfer |    off"
        tail = "slower without" if args.refinements else "best/compute  hidden"
        print(f"grid  pass      {head}" + "".join(f"{x:>16}" for x in variants) + f"   {tail}")
    for rows in dict.fromkeys((1, comm.size)):
        grid = ProcessGrid(comm, rows, comm.size // rows)
        with threadpool_limits(1):
            runs = _measured(grid, args)
        for phase in ("forward", "backward"):
            line = (_refinements if args.refinements else _overlap)(runs, phase)
            if comm.rank == 0:
                print(f"{grid.rows}x{grid.cols:<3} {phase:<9}{line}", flush=True)
        for run in runs.values():
            run.plan.free()
        grid.free()
    return 0


def _overlap(runs: dict[str, Measurement], phase: str) -> str:
    variants = {x: _median(run, f"{phase}/total") for x, run in runs.items()}
    busy = _median(runs["off"], f"{phase}/compute", f"{phase}/merge")
    off = variants.pop("off")
    best, transfer = min(variants.values()), off - busy
    hidden = (off - best) / max(min(busy, transfer), 1e-9)
    return (
        f"{busy:8.3f}{transfer:9.3f} |{off:7.3f}"
        + "".join(f"{x:16.3f}" for x in variants.values())
        + f"{best / busy:15.2f}{hidden:8.0%}"
    )


def _refinements(runs: dict[str, Measurement], phase: str) -> str:
    seconds = [_median(run, f"{phase}/total") for run in runs.values()]
    slower = "".join(f"{x / seconds[0] - 1:8.1%}" for x in seconds[1:])
    return "".join(f"{x:16.3f}" for x in seconds) + slower


@contextmanager
def _without(refinement: str) -> Iterator[None]:
    """Plans that are made here, and called for the first time, lack a refinement."""
    kept = {(module, name): getattr(module, name) for module, name in REFINEMENTS[refinement]}
    try:
        for (module, name), other in REFINEMENTS[refinement].items():
            setattr(module, name, other)
        yield
    finally:
        for (module, name), function in kept.items():
            setattr(module, name, function)


def _measured(grid: ProcessGrid, args: argparse.Namespace) -> dict[str, Measurement]:
    """All trials of every variant."""
    runs = {}
    variants = {"off": ("all", False), **{x: ("all", x) for x in PROGRESS}}
    if args.refinements:
        variants = {x: (x, True) for x in REFINEMENTS}
    sizes = {x: getattr(args, x) for x in ("seqlen", "nheads", "headdim")}
    for name, (refinement, overlap) in variants.items():
        with _without(refinement):
            plan = Attention2D(
                grid, make_mask(args.mask, args.seqlen), overlap=overlap, threads=1, **sizes
            )
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
