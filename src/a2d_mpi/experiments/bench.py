"""The job of drivers/bench.py: methods x grids x workloads, checked, timed in turn, kept."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from zlib import crc32

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from a2d_mpi.attention.methods import make_plan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments.benchmark import add_results, start_benchmark
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.inputs import random_inputs
from a2d_mpi.experiments.mask_file import FILE
from a2d_mpi.experiments.measure import Measurement, open_device, origin_of
from a2d_mpi.experiments.options import FAILED_CHECK, checked_rows
from a2d_mpi.experiments.results import Result, phases_of
from a2d_mpi.experiments.summary import summarise, table
from a2d_mpi.experiments.sweep import Configuration, cases_of, plans_for
from a2d_mpi.experiments.timing import turns
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.profile import read_machine, to_toml
from a2d_mpi.schedules import METHODS

OVERLAPS = {"on": (True,), "off": (False,), "both": (True, False)}
SPANS = ("all", "picked", "none")  # the planner's; they are most of a file


def bench(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Run what a file lacks, workload by workload; returns the exit code."""
    prepared = comm.bcast(together(comm, lambda: _prepare(args, comm.size), on=0))
    sweep, settings, machine, done = prepared
    together(comm, lambda: [block[0].case.name for block in sweep])  # nodes read mask files, too
    device = open_device(comm, args.device)
    grids: dict[tuple, ProcessGrid] = {}
    calls = args.trials + max(1, args.warmup)
    skipped = [c for block in sweep for c in block if c.name in done]
    blocks = [[c for c in block if c.name not in done] for block in sweep]
    passed = all(done[c.name] for c in skipped)
    with (
        threadpool_limits(args.threads),
        tqdm(total=calls * sum(map(len, blocks)), disable=comm.rank != 0, unit="call") as bar,
    ):
        if comm.rank == 0 and skipped:
            bar.write(f"{len(skipped)} configurations are in {args.output} already")
        for block in filter(None, blocks):
            bar.set_description(block[0].case.name)
            measured = _checked(comm, block, args, device, grids, bar.update)
            # Only now, when nothing of it can be refused any more, there is a file.
            together(comm, lambda: add_results(args.output, settings, {}), on=0)
            results = _timed(comm, measured, args, device, machine, bar.update)
            together(comm, lambda new=results: add_results(args.output, settings, new), on=0)
            passed &= comm.bcast(all(result.passed for result in results.values()))
            if comm.rank == 0:
                found = [summarise(x, [phase]) for x in results.values() for phase in phases_of(x)]
                bar.write(table(found))
    if comm.rank == 0:
        print(f"written to {args.output}" + "; A CHECK FAILED" * (not passed), flush=True)
    for grid in grids.values():
        grid.free()
    return 0 if passed else FAILED_CHECK


def _prepare(args: argparse.Namespace, ranks: int) -> tuple:
    """Blocks of configurations, settings, machine, and what is done; on one rank."""
    machine = read_machine(args.profile) if args.profile else None
    masks = [f"{FILE}{args.mask_file}"] if args.mask_file else args.masks
    cases = cases_of(args, masks)
    specs = [x.strip() for x in args.plans.split(",") if x.strip()]
    if not (cases and specs):
        raise ValueError("nothing to run: a list is empty")
    for c in cases:  # before anything walks over all tokens
        c.work()
        c.check_room(ranks)
    overlaps = OVERLAPS[args.overlap]
    sweep = [plans_for(x, specs, ranks, tuple(METHODS), overlaps, machine) for x in cases]
    names = ("trials", "warmup", "seed", "device", "kernel", "transfers", "threads")
    settings = {name: getattr(args, name) for name in names}
    settings["machine"] = machine.name if machine else "none"
    # Predictions and picks of one file are those of one profile, whatever its name.
    settings["profile"] = f"{crc32(to_toml(machine).encode()):08x}" if machine else "none"
    return sweep, settings, machine, start_benchmark(args.output, settings, args.resume)


def _checked(
    comm: MPI.Intracomm,
    block: list[Configuration],
    args: argparse.Namespace,
    device: Device,
    grids: dict[tuple, ProcessGrid],
    update: Callable[[int], object],
) -> dict[Configuration, Measurement]:
    """Make and check all plans of a workload."""
    inputs: dict[bytes, dict[str, np.ndarray]] = {}
    measured: dict[Configuration, Measurement] = {}
    for c in block:
        shape = tuple(getattr(c.layout, x) for x in ("rows", "cols", "heads", "order", "block"))
        if shape not in grids:
            grids[shape] = ProcessGrid(comm, *shape)
        engine = {x: getattr(args, x) for x in ("kernel", "transfers", "threads")}
        mask = c.case.work().mask
        plan = make_plan(
            c.method, grids[shape], mask, overlap=c.overlap, **c.case.arguments, **engine
        )
        known = inputs.get(plan.tokens.tobytes())  # plans whose shards are the same share them
        made = together(
            comm, lambda x=plan, y=known: y or random_inputs(x, args.backward, args.seed)
        )
        inputs[plan.tokens.tobytes()] = made
        measured[c] = Measurement(plan, made, args.backward, device)
        for _ in range(max(1, args.warmup)):
            measured[c].call()
            update(1)
        measured[c].check(checked_rows(args.check), args.seed)
    return measured


def _timed(
    comm: MPI.Intracomm,
    measured: dict[Configuration, Measurement],
    args: argparse.Namespace,
    device: Device,
    machine: Machine | None,
    update: Callable[[int], object],
) -> dict[str, Result]:
    """Time the plans of a workload in turn; the results, on rank 0."""
    origin = origin_of(comm, device)
    for run in turns(list(measured.values()), args.trials):
        run.trial()
        update(1)
    results, same = {}, ("check", "trials", "warmup", "seed", "threads", "kernel")
    for c, run in measured.items():
        run.finish()
        config = {
            "name": c.name,
            "workload": c.case.name,
            "method": c.method,
            "mask": c.case.mask,
            "picked": c.picked,
            **{x: getattr(args, x) for x in same},
            "device": device.name,
        }
        seconds, figures = {}, {}
        if comm.rank == 0:
            plan = run.plan
            seconds, figures = c.expected(machine, plan.layout, plan.distribution.name)
        result = run.result(config, origin, predicted=seconds, figures=figures)
        if result:
            if args.spans == "none" or (args.spans == "picked" and not c.picked):
                result.spans.clear()
            results[c.name] = result
        run.plan.free()
    return results
