r"""Benchmarks: attention, and kernels.

    mpiexec -n 4 python -m a2d_mpi bench --output results/bench.h5 --seqlens 512 --plans all
    python -m a2d_mpi bench kernels --shapes 512x2x64 --trials 3

All results are checked, also those of an earlier run.

Exit code 0: all checks passed.  1: a check failed.  2: bad input, or the output cannot be written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

from a2d_mpi.checks.measure import Measurement, open_device, origin_of, random_inputs
from a2d_mpi.checks.timing import plan_of, turns
from a2d_mpi.cli.options import (
    FAILED_CHECK,
    Parser,
    add_engine,
    add_options,
    check_text,
    checked_rows,
    log,
    progress,
)
from a2d_mpi.cli.run import together
from a2d_mpi.cli.workloads import (
    add_plans,
    add_workloads,
    expected,
    plans_for,
    workloads_of,
)
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.commands.bench_kernels import kernels
from a2d_mpi.core.layout import Layout
from a2d_mpi.devices.protocol import Device
from a2d_mpi.planning.choice import Choice, workload_name
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.profile import read_machine, to_toml
from a2d_mpi.planning.workload import Workload
from a2d_mpi.results.hdf5 import BENCHMARK_SCHEMA, extend_file
from a2d_mpi.results.tables import done_before, summarise, table


def attention(parser: Parser) -> Callable:
    r"""Compare plans x workloads, checked, timed in turn, in one HDF5 file.

        mpiexec -n 4 python -m a2d_mpi bench --output results/bench.h5 --seqlens 512 --plans all
        mpiexec -n 4 python -m a2d_mpi bench --output results/bench.h5 --plans auto,ring \
            --seqlens 2048,4K --masks full,causal --nheads-kv 8,1 --backward \
            --profile results/here.toml --resume

    Every combination of the lists is run.  All plans of a workload (mask, sizes, dtype) are made
    and checked first.  Then they are timed trial by trial in turn, so that they meet the same
    machine.  When a workload is done, a new file with its results takes the place of the old file.
    A job that is killed leaves a whole file and loses only the workload in progress.  --resume
    runs what is not there yet.  Other numbers of ranks may add to the same file.
    """
    add_workloads(parser)
    group = parser.add_argument_group("plans")
    add_plans(parser, group, default="all")
    for name, value, text in (
        ("--overlap", True, "communicate while computing (default)"),
        ("--no-overlap", False, "communicate and compute in turn; with --overlap: run both"),
    ):
        group.add_argument(name, dest="overlaps", action="append_const", const=value, help=text)
    add_options(group, "profile")
    group = parser.add_argument_group("measurement and checks")
    add_options(group, "trials")
    add_options(group, "warmup", help="runs before the timed runs; at least one is made")
    add_options(group, "check", type=check_text())
    add_options(group, "seed")
    group = parser.add_argument_group("output")
    add_options(group, "output", required=True)
    add_options(group, "resume")
    add_engine(parser)
    return bench


def bench(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Run the configurations that a file lacks, workload by workload; return the exit code."""
    works = together(comm, lambda: _works(args, comm.size))
    # Masks do not travel: those of a user may be of any class.
    prepared = comm.bcast(together(comm, lambda: _prepare(args, works, comm.size), on=0))
    found, settings, machine, done = prepared
    sweep = [
        [Choice(*x[:2], work, x[2]) for work, plans in zip(*block) for x in plans]
        for block in zip(works, found)
    ]
    grids: dict[Layout, ProcessGrid] = {}
    device = open_device(comm, args.device)
    skipped = [c for block in sweep for c in block if c.name in done]
    blocks = ([c for c in block if c.name not in done] for block in sweep)
    right = all(done[c.name] for c in skipped)
    if comm.rank == 0 and skipped:
        log.info("%d configurations are in %s already", len(skipped), args.output)
    with progress([x for x in blocks if x], comm.rank, desc="workloads") as bar:
        for block in bar:
            runs = _checked(comm, block, args, device, grids)
            for run in turns(list(runs.values()), args.trials):
                run.trial()
            origin = origin_of(comm, device)
            results = {c.name: _result(c, run, args, machine, origin) for c, run in runs.items()}
            for run in runs.values():
                run.plan.free()
            new = {"settings": settings, "runs": results}
            together(comm, lambda x=new: extend_file(args.output, BENCHMARK_SCHEMA, x), on=0)
            if comm.rank == 0:
                right &= all(x["passed"] for x in results.values())
                rows = [summarise(x, [phase]) for x in results.values() for phase in x["timings"]]
                bar.write(table(rows))
    right = comm.bcast(right)
    if comm.rank == 0:
        print(f"written to {args.output}" + "; A CHECK FAILED" * (not right), flush=True)
    for grid in grids.values():
        grid.free()
    return 0 if right else FAILED_CHECK


def _works(args: argparse.Namespace, ranks: int) -> list[list[Workload]]:
    """Return the workloads; those that differ in their overlap only stand together."""
    works = workloads_of(args)
    for work in works:  # before anything walks over all tokens
        work.check_room(ranks)
    return [[replace(x, overlap=overlap) for overlap in args.overlaps or [True]] for x in works]


def _prepare(args: argparse.Namespace, works: list[list[Workload]], ranks: int) -> tuple:
    """Return plans by workload, settings, machine, and earlier results; on one rank."""
    machine = read_machine(args.profile) if args.profile else None
    found = [
        [
            [(x.method, x.layout, x.picked) for x in plans_for(work, args.plans, ranks, machine)]
            for work in block
        ]
        for block in works
    ]
    names = ("trials", "warmup", "seed", "device", "kernel", "transfers", "threads")
    settings = {name: getattr(args, name) for name in names}
    settings["machine"] = machine.name if machine else "none"
    # All predictions and picks of a file must come from the same profile, whatever its name.
    settings["profile"] = f"{crc32(to_toml(machine).encode()):08x}" if machine else "none"
    done = done_before(args.output, args.resume, settings)
    return found, settings, machine, done


def _checked(
    comm: MPI.Intracomm,
    block: list[Choice],
    args: argparse.Namespace,
    device: Device,
    grids: dict[Layout, ProcessGrid],
) -> dict[Choice, Measurement]:
    """Make and check all plans of a workload."""
    inputs: dict[bytes, dict[str, np.ndarray]] = {}
    runs: dict[Choice, Measurement] = {}
    options = {x: getattr(args, x) for x in ("kernel", "transfers", "threads")}
    for c in block:
        plan = plan_of(comm, c, grids, **options)
        tokens = plan.tokens.tobytes()  # plans with the same shards share their inputs
        earlier = inputs.get(tokens)
        inputs[tokens] = together(
            comm, lambda x=plan, y=earlier: y or random_inputs(x, args.backward, args.seed)
        )
        runs[c] = Measurement(plan, inputs[tokens], args.backward, device)
        for _ in range(max(1, args.warmup)):
            runs[c].call()
        runs[c].check(checked_rows(args.check), args.seed)
    return runs


def _result(
    c: Choice,
    run: Measurement,
    args: argparse.Namespace,
    machine: Machine | None,
    origin: Mapping[str, object],
) -> dict[str, Any]:
    """Return what the file has of a timed plan on rank 0, an empty dict on other ranks."""
    named = {"name": c.name, "workload": workload_name(c.work.attributes)}
    config = {**named, "mask": c.work.mask_text, "picked": c.picked}
    result = run.result(args, config, origin)
    if result:
        made = replace(c, layout=run.plan.layout)
        result["predicted"] = expected(made, machine, run.plan.distribution.name)
    return result


COMMANDS, DEFAULT = (attention, kernels), "attention"
