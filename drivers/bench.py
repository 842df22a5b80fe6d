"""Rivals side by side: methods x grids x workloads, checked, timed in turn, in one HDF5 file.

    mpiexec -n 4 python drivers/bench.py --output results/bench.h5 --plans all \
        --seqlens 2048,4096 --masks full,causal --nheads 8 --nheads-kv 8,1 --headdim 64 \
        --backward --trials 5 --profile here.toml --resume

A plan is METHOD[:RxC[xU]][@order]: "attention2d:2x2", "ring", "ring:2x1x2" (2 ranks share the
heads), "double ring:2x2" (2 outer steps over inner rings of 2), "striped ring"; "all": every
layout that the planner knows; "auto": the planner's choice for --profile, "auto:5": and its
next four, "auto:each": its choice of each method.  Lists are separated by commas, and every
combination is run.

All plans of a workload (mask, sizes, dtype) are made and checked first, then timed trial by
trial in turn, so that they meet the same machine.  When a workload is done, a new file with its
results takes the place of the old one: a job that is killed, however, leaves a whole file, and
loses the workload in progress.  --resume runs what is not there yet; other rank counts may add to
the same file.

Exit code 0: all checks passed, also those of an earlier run.  1: a check failed.  2: bad input, or
the output cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from a2d_mpi import ProcessGrid
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.gpus import TRANSFERS
from a2d_mpi.core.atomic import refuse_same
from a2d_mpi.core.dtypes import as_dtype
from a2d_mpi.core.masks import MASKS
from a2d_mpi.core.sizes import Layout, check_room
from a2d_mpi.experiments.benchmark import add_results, start_benchmark
from a2d_mpi.experiments.cli import FAILED_CHECK, Parser, arguments, run, together
from a2d_mpi.experiments.measure import (
    METHODS,
    SAMPLE,
    Measurement,
    make_plan,
    open_device,
    origin_of,
    random_rows,
)
from a2d_mpi.experiments.options import METHOD_HELP, ORDER_HELP, SEED, THREADS, TRIALS, WARMUP
from a2d_mpi.experiments.results import Result
from a2d_mpi.experiments.summary import phases_of, summarise
from a2d_mpi.experiments.sweep import Case, Configuration, plans_for
from a2d_mpi.kernels import KERNELS
from a2d_mpi.planning.calibration import to_toml
from a2d_mpi.planning.machine import Machine, parse_count, read_machine

OVERLAPS = {"on": True, "off": False}
SPANS = ("all", "picked", "none")  # the planner's; they are most of a file


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser(prog="bench.py", description=__doc__.split("\n\n")[0], comm=comm)
    add = parser.add_argument
    add("--output", required=True, help="HDF5 file")
    add("--resume", action="store_true", help="add to the file what is not there yet")
    add(
        "--plans",
        default="all",
        help="METHOD[:RxC[xU]][@order], all, auto, auto:5, auto:each (default %(default)s); "
        f"METHOD is {METHOD_HELP}; order, rcu by default: {ORDER_HELP}",
    )
    add("--seqlens", default="2048", help="tokens: 4096, 64K, ... (default %(default)s)")
    add("--masks", default="causal", help=f"of {', '.join(MASKS)} (default %(default)s)")
    add("--nheads", default="8", help="query heads (default %(default)s)")
    add("--nheads-kv", help="key heads; default: as many as query heads")
    add("--headdim", default="64", help="elements of a head (default %(default)s)")
    add("--dtypes", default="float32", help="default %(default)s")
    add("--backward", action="store_true", help="also the gradients")
    add("--overlap", default="on", help="on, off (phase by phase) or both (default %(default)s)")
    add("--trials", type=TRIALS, default=5, help="timed runs of each (default %(default)s)")
    add("--warmup", type=WARMUP, default=1, help="runs before, 1 at least (default %(default)s)")
    add("--spans", choices=SPANS, default="all", help="of which plans to keep what ranks did when")
    add("--seed", type=SEED, default=0, help="of the numbers, and of the rows that are checked")
    add("--profile", help="TOML file of this machine, for predictions; see drivers/calibrate.py")
    add("--device", choices=("cpu", "gpu"), default="cpu", help="ranks may share a GPU")
    add("--kernel", choices=KERNELS, default="auto", help="default: the fastest for the device")
    add("--transfers", choices=TRANSFERS, default="auto", help="of GPU arrays: see docs/gpus.md")
    add("--threads", type=THREADS, default=1, help="BLAS threads per rank (default %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the driver; returns the exit code."""
    comm = MPI.COMM_WORLD
    args = arguments(comm, build_parser, argv)
    prepared = comm.bcast(together(comm, lambda: _prepare(args, comm.size), on=0))
    sweep, settings, machine, done = prepared
    device = open_device(comm, args.device)
    grids: dict[Layout, ProcessGrid] = {}
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
                bar.write(_table(results))
    if comm.rank == 0:
        print(f"written to {args.output}" + "; A CHECK FAILED" * (not passed), flush=True)
    for grid in grids.values():
        grid.free()
    return 0 if passed else FAILED_CHECK


def _prepare(args, ranks: int):
    """Blocks of configurations, settings, machine, and what is done; on one rank."""
    refuse_same(args.output, args.profile)
    machine = read_machine(args.profile) if args.profile else None
    overlaps = []
    for x in _list(args.overlap.replace("both", "on,off")):
        if x not in OVERLAPS:
            raise ValueError(f"--overlap must be on, off or both, got {x!r}")
        overlaps.append(OVERLAPS[x])
    heads = [parse_count(x) for x in _list(args.nheads)]
    heads_kv = [None]  # as many
    if args.nheads_kv is not None:
        heads_kv = [parse_count(x) for x in _list(args.nheads_kv)]
    cases = [
        Case(
            *(mask, seqlen, nheads, nheads if nheads_kv is None else nheads_kv),
            *(headdim, dtype, args.backward),
        )
        for dtype, headdim, nheads, nheads_kv, seqlen, mask in product(
            _list(args.dtypes),
            [parse_count(x) for x in _list(args.headdim)],
            heads,
            heads_kv,
            [parse_count(x) for x in _list(args.seqlens)],
            _list(args.masks),
        )
    ]
    specs = _list(args.plans)
    if not (cases and specs and overlaps):
        raise ValueError("nothing to run: a list is empty")
    for c in cases:  # before anything walks over all tokens
        c.work()
        sizes = (c.seqlen, c.nheads, c.nheads_kv, c.headdim, as_dtype(c.dtype).itemsize)
        check_room(*sizes, ranks)
    sweep = [
        plans_for(case, specs, ranks, tuple(METHODS), overlaps, machine)
        for case in dict.fromkeys(cases)
    ]
    names = ("trials", "warmup", "seed", "device", "kernel", "transfers", "threads")
    settings = {name: getattr(args, name) for name in names}
    settings["machine"] = machine.name if machine else "none"
    # Predictions and picks of one file are those of one profile, whatever its name.
    settings["profile"] = f"{crc32(to_toml(machine).encode()):08x}" if machine else "none"
    return sweep, settings, machine, start_benchmark(args.output, settings, args.resume)


def _checked(
    comm: MPI.Intracomm,
    block: list[Configuration],
    args,
    device: Any,
    grids: dict[Layout, ProcessGrid],
    update: Callable[[int], object],
) -> dict[Configuration, Measurement]:
    """Make and check all plans of a workload."""
    inputs: dict[bytes, dict[str, np.ndarray]] = {}
    measured: dict[Configuration, Measurement] = {}
    for c in block:
        if c.layout not in grids:
            shape = (c.layout.rows, c.layout.cols, c.layout.heads, c.layout.order)
            grids[c.layout] = ProcessGrid(comm, *shape)
        plan = make_plan(
            c.method,
            grids[c.layout],
            MASKS[c.case.mask](),
            seqlen=c.case.seqlen,
            nheads=c.case.nheads,
            nheads_kv=c.case.nheads_kv,
            headdim=c.case.headdim,
            dtype=c.case.dtype,
            overlap=c.overlap,
            kernel=args.kernel,
            transfers=args.transfers,
            threads=args.threads,
        )
        tensors = together(comm, partial(_inputs, plan, args, inputs))
        measured[c] = Measurement(plan, tensors, args.backward, device)
        for _ in range(max(1, args.warmup)):
            measured[c].call()
            update(1)
        measured[c].check(SAMPLE, args.seed)
    return measured


def _timed(
    comm: MPI.Intracomm,
    measured: dict[Configuration, Measurement],
    args,
    device: Any,
    machine: Machine | None,
    update: Callable[[int], object],
) -> dict[str, Result]:
    """Time the plans of a workload in turn; the results, on rank 0."""
    origin, block = origin_of(comm, device), list(measured)
    for trial in range(args.trials):
        first = trial % len(block)  # nobody always runs after the same one
        for c in block[first:] + block[:first]:
            measured[c].trial()
            update(1)
    results = {}
    for c, its in measured.items():
        its.finish()
        config = {
            "name": c.name,
            "workload": c.case.name,
            "method": c.method,
            "ranks": comm.size,
            "mask": c.case.mask,
            "picked": c.picked,
            "check": "sample",
            **{x: getattr(args, x) for x in ("trials", "warmup", "seed", "threads", "kernel")},
            "device": device.name,
        }
        seconds, figures = {}, {}
        if comm.rank == 0:
            seconds, figures = c.expected(machine, its.plan.distribution.name)
        result = its.result(config, origin, predicted=seconds, figures=figures)
        if result:
            if args.spans == "none" or (args.spans == "picked" and not c.picked):
                result.spans.clear()
            results[c.name] = result
        its.plan.free()
    return results


def _inputs(
    plan: AttentionPlan, args, known: dict[bytes, dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """This rank's part of synthetic tensors, which do not depend on the ranks.

    Plans with the same part share them: `known`, by the tokens.
    """
    tokens = plan.tokens.tolist()
    key = plan.tokens.tobytes()
    if key not in known:
        shapes = {"dout": plan.nheads, "q": plan.nheads, "k": plan.nheads_kv, "v": plan.nheads_kv}
        known[key] = {
            name: random_rows(tokens, (heads, plan.headdim), plan.dtype, args.seed, stream)
            for stream, (name, heads) in enumerate(shapes.items())
            if name != "dout" or args.backward
        }
    return known[key]


def _table(results: dict[str, Result]) -> str:
    """One line for each plan and phase: the slowest rank in the median trial."""
    first = next(iter(results.values()))
    lines = [
        first.config["workload"] + f", {first.config['ranks']} ranks",
        f"  {'plan':<30} {'phase':<9}" + "       ms     wait predicted    received  checks",
    ]
    for result in results.values():
        for phase in phases_of(result):
            x = summarise(result, [phase])
            predicted = "" if math.isnan(x.predicted) else f"{1e3 * x.predicted:.2f}"
            lines.append(
                f"  {x.plan:<30} {phase:<9}{1e3 * x.seconds:>9.2f}{1e3 * x.parts['wait']:>9.2f}"
                f"{predicted:>10}{x.received:>12}  {'passed' if x.passed else 'FAILED'}"
                f"{'  (picked)' if x.picked else ''}"
            )
    return "\n".join(lines)


def _list(text: str) -> list[str]:
    return [x.strip() for x in text.split(",") if x.strip()]


if __name__ == "__main__":
    run(MPI.COMM_WORLD, "bench.py", main)
