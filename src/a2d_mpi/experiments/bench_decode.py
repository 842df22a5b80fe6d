"""The program of `drivers/bench.py decode`: seconds, bytes and messages of a decoding step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core import reference
from a2d_mpi.core.sizes import misfit
from a2d_mpi.experiments.check import report, within
from a2d_mpi.experiments.cli import check_room, together
from a2d_mpi.experiments.hdf5 import check_output, write_file
from a2d_mpi.experiments.measure import origin_of
from a2d_mpi.experiments.results import Check
from a2d_mpi.experiments.streams import progress
from a2d_mpi.experiments.trace import COMMUNICATION, COMPUTE, Slice, Trace, check_trace
from a2d_mpi.gpt.apart import attention_grid, open_apart, step_traffic_apart, weights_of_rank
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.cost import cache_bytes
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.steps import step_traffic

SCHEMA = ("a2d_mpi decoding", 1)
# Parts of a step's seconds.  "cpu" is a part of attention; "wait", for other ranks, is a part of
# "merge" and "other".
DECODE_PARTS = ("attention", "merge", "other", "cpu", "wait")
COLUMNS = ("ranks", "context", "step", *DECODE_PARTS, "wait %", "sent bytes", "messages")
BOUND = 1e-4  # largest error of attention, relative to its largest value
SIZES = ("layers", "width", "nheads", "nheads_kv", "headdim", "requests", "micro_batches")
SIZES += ("trials", "seed")
Split = tuple[int, int]


def bench_decode(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure all contexts on all numbers of ranks; return the exit code."""
    config = together(comm, lambda: _validated(comm, args))
    what = (
        f"{config.parameters} parameters (--layers, --width) and the cache of {args.requests} "
        f"requests (--requests) of {max(args.contexts)} tokens (--contexts)"
    )
    runs = [(x, None) for x in args.ranks] + [(x[0], x) for x in args.apart or ()]
    for ranks, _ in runs:  # that hold the cache
        check_room(comm, f"{what} on one of {ranks} ranks", _room(config, args, ranks), ranks)
    sizes = {x: getattr(args, x) for x in SIZES}
    sizes |= {"block": args.kv_block, "heads": args.head_ranks}
    origin, measured = origin_of(comm), {}
    trace = Trace(comm, args.trace) if args.trace else None
    rows, checks = [[*COLUMNS, "cache MB"]], {}
    for ranks, split in progress(runs, comm.rank, desc="ranks"):
        label = f"{split[0]}+{split[1]}" if split else str(ranks)
        used = sum(split) if split else ranks
        part = comm.Split(0 if comm.rank < used else MPI.UNDEFINED, comm.rank)
        if part != MPI.COMM_NULL:
            shape = 1, ranks // args.head_ranks, args.head_ranks
            grid = attention_grid(part, split, shape) if split else ProcessGrid(part, *shape)
            with threadpool_limits(args.threads):
                for context in args.contexts:
                    name = f"{label} ranks, {context} tokens"
                    to = trace and (trace, name)
                    found = _measured(part, grid, split, config, args, context, to)
                    if found is None:
                        continue
                    run, checks[name] = found
                    measured[f"{label}/{context}"] = run
                    rows.append([label, str(context), *_numbers(run)])
            if grid:
                grid.free()
            part.Free()
        together(comm, lambda: None, on=0)  # ranks that do not take part sleep until then
    if trace:
        for section in trace.sections:  # empty lists for ranks that did not take part
            section += [[]] * (comm.size - len(section))
        together(comm, trace.write, on=0)
    if args.output:
        tree = {**origin, "config": sizes, "runs": measured}
        together(comm, lambda: write_file(args.output, SCHEMA, tree), on=0)
    if comm.rank == 0:
        print(f"{args.requests} requests, {args.layers} layers; milliseconds of a step, medians")
    return report(comm, rows, checks)


def _measured(
    comm: MPI.Intracomm,
    grid: ProcessGrid | None,
    split: Split | None,
    config: GPTConfig,
    args: argparse.Namespace,
    context: int,
    trace: tuple[Trace, str] | None,
) -> tuple[dict[str, object], dict[str, Check]] | None:
    """Check and time steps after a context of random keys and values; None but on rank 0."""
    names, ranks = list(range(args.requests)), split[0] if split else comm.size
    positions = ranks // args.head_ranks
    decoder = _decoder(comm, grid, split, config, args)
    for name in names:
        decoder.table.admit(name, context + args.trials + 1)
        owners = np.array(decoder.table.append(name, context))
        if grid:
            _fill(decoder, config, args.seed, name, owners)
    shape = args.requests, config.nheads, config.headdim
    q = np.random.default_rng(args.seed).standard_normal(shape, np.float32)
    out = decoder.attention.attend(config.layers - 1, names, q) if grid else None
    spent = decoder.attention.seconds if grid else dict.fromkeys(DECODE_PARTS, 0.0)
    seconds, sent = [], set()
    for _ in range(args.trials + 1):
        before, counted = dict(spent), decoder.sent
        log: list[tuple[str, float, float]] = []
        for x in decoder.exchanges:
            x.log = log
        comm.Barrier()
        start = time.perf_counter()
        decoder.step(dict.fromkeys(names, 1))
        total = time.perf_counter() - start
        parts = {x: y - before[x] for x, y in spent.items()}
        parts["other"] = total - parts["attention"] - parts["merge"]
        parts["wait"] = sum(end - begin for what, begin, end in log if what == "wait")
        seconds.append([parts[x] for x in DECODE_PARTS])
        sent.add(tuple(b - a for a, b in zip(counted, decoder.sent)))
    if split:
        at = comm.rank, (positions, args.head_ranks), split[1]
        predicted = step_traffic_apart(config, *at, args.requests, args.micro_batches, 4)
    else:
        predicted = step_traffic(config, positions, args.head_ranks, args.requests, 4)
    off = max(abs(a - b) for x in sent for a, b in zip(x, predicted))
    traffic = Check(float(comm.allreduce(off, op=MPI.MAX)), 0.0, comm.size)
    nbytes = comm.allreduce(decoder.cache.nbytes if grid else 0, op=MPI.MAX)
    counts = np.array([*max(sent), *predicted])
    comm.Allreduce(MPI.IN_PLACE, counts, MPI.MAX)  # counts of the rank that sends most
    of_ranks = comm.gather(seconds[1:])  # the first step is the warm-up
    decoder.free()
    if trace:
        slices = comm.gather(_slices(log, start, total, trace[1]))
        trace[0].sections += [slices] if slices else []
    if of_ranks is None:
        return None
    counted = [f"{x}_{y}" for x in ("sent", "predicted") for y in ("bytes", "messages")]
    checks = {"out": _check(config, args, context, q, out), "traffic": traffic}
    run = {
        **dict(zip(counted, counts.tolist())),
        "cache_bytes": nbytes,
        "parts": list(DECODE_PARTS),
        "attention_ranks": ranks,
        "seconds": np.array(of_ranks).swapaxes(0, 1),
        "checks": {name: x.attributes for name, x in checks.items()},
    }
    return run, checks


def _decoder(
    comm: MPI.Intracomm,
    grid: ProcessGrid | None,
    split: Split | None,
    config: GPTConfig,
    args: argparse.Namespace,
) -> Decoder:
    """Make a decoder with random weights and unlimited room."""
    weights = Parameters(config, initial(config, args.seed, "float32"))
    if not split:
        return Decoder(grid, weights, [1 << 30] * grid.group_comm.size, args.kv_block)
    weights = Parameters(config, *weights_of_rank(weights, comm.rank, split))
    rooms = [1 << 30] * (split[0] // args.head_ranks)
    return open_apart(
        comm, grid, split, weights, rooms, args.kv_block, micro_batches=args.micro_batches
    )


def _fill(decoder: Decoder, config: GPTConfig, seed: int, name: int, owners: np.ndarray) -> None:
    """Put random keys and values of a request into the cache; token i lies on rank owners[i]."""
    own, heads = owners == decoder.cache.rank, decoder.attention.heads_kv
    for layer in range(config.layers):
        k, v = _keys(config, seed, len(owners), name, layer)[:, own, heads]
        decoder.cache.put(layer, name, k, v)


def _slices(
    log: Sequence[tuple[str, float, float]], start: float, total: float, name: str
) -> list[Slice]:
    """Make the slices of a step: this rank's computing for each micro-batch, and its waits."""
    slices = [Slice(COMPUTE, name, "total", 0.0, total, {})]
    for what, begin, end in log:
        thread, part = (COMMUNICATION, what) if what == "wait" else (COMPUTE, "compute")
        slices.append(Slice(thread, what, part, begin - start, end - start, {}))
    return slices


def _keys(config: GPTConfig, seed: int, *which: int) -> np.ndarray:
    """Draw random keys and values, (2, tokens, Hkv, D), of a context, request and layer."""
    shape = 2, which[0], config.nheads_kv, config.headdim
    return np.random.default_rng([seed, *which]).standard_normal(shape, np.float32)


def _check(
    config: GPTConfig, args: argparse.Namespace, context: int, q: np.ndarray, out: np.ndarray
) -> Check:
    """Compare attention of the last request's row in the last layer with float64."""
    name = args.requests - 1
    k, v = _keys(config, args.seed, context, name, config.layers - 1)
    visible = np.ones((1, context), bool)
    exact, _ = reference.attention(q[[name]], k, v, visible, config.headdim**-0.5)
    return within(BOUND, out[[name]], exact)


def _numbers(run: Mapping[str, Any]) -> list[str]:
    """Return the numbers of a run in the table: medians over the trials."""
    seconds = 1e3 * run["seconds"]  # (trials, ranks, parts)
    step = np.median(seconds[..., :3].sum(axis=2).max(axis=1))
    parts = np.median(seconds.mean(axis=1), axis=0)
    waits = np.median(seconds[..., 4] / seconds[..., :3].sum(axis=2), axis=0)  # (ranks,)
    kinds = np.split(100 * waits, [run["attention_ranks"]])
    shares = " + ".join(f"{x.mean():.0f}" for x in kinds if len(x))
    counts = f"{run['sent_bytes']}", f"{run['sent_messages']}", f"{run['cache_bytes'] / 1e6:.1f}"
    return [*(f"{x:.2f}" for x in (step, *parts)), shares, *counts]


def _validated(comm: MPI.Intracomm, args: argparse.Namespace) -> GPTConfig:
    """Refuse options that do not fit, and choose the default number of ranks and headdim."""
    heads = args.head_ranks
    if args.ranks is None:
        args.ranks = [heads << i for i in range(comm.size.bit_length())]
        args.ranks = [x for x in args.ranks if x <= comm.size]
    if not args.ranks or max(args.ranks) > comm.size or any(x % heads for x in args.ranks):
        raise ValueError(
            f"--ranks must be multiples of --head-ranks {heads} and at most {comm.size}, "
            f"got {args.ranks}"
        )
    for x in args.apart or ():
        if min(x) < 1 or sum(x) > comm.size or x[0] % heads:
            raise ValueError(
                f"--apart must be at least 1+1 ranks and at most {comm.size} together, the first "
                f"a multiple of --head-ranks {heads}, got {x[0]}+{x[1]}"
            )
    if comm.rank == 0:
        check_output(args.output, SCHEMA)
    check_trace(args.trace)
    most = max(args.contexts) + args.trials + 1
    sizes = args.layers, args.width, args.nheads, most, args.nheads_kv
    config = GPTConfig(256, *sizes, positions="rotary", headdim=args.headdim)
    if why := misfit(config.nheads, config.nheads_kv, heads):
        raise ValueError(f"--head-ranks {heads}: {why}")
    args.headdim = config.headdim
    return config


def _room(config: GPTConfig, args: argparse.Namespace, ranks: int) -> int:
    """Return the bytes of one of `ranks` ranks: weights, cache, and the check of one request."""
    blocks = -(-config.seqlen // args.kv_block) * args.requests
    kept = args.kv_block * -(-blocks // (ranks // args.head_ranks))
    # Bytes per token: random keys in float32, a copy in float64, logits of a query, and owners.
    keys = config.nheads_kv * config.headdim
    token = 2 * 4 * keys + 2 * 8 * keys + 4 * 8 * config.nheads + 40
    nbytes = cache_bytes(config, kept, 4) // args.head_ranks
    return nbytes + 4 * config.parameters + token * max(args.contexts)
