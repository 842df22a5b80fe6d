"""The program of `drivers/bench.py decode`: seconds, bytes and messages of a decoding step.

The file::

    /                        attributes: schema, schema_version, provenance
    /config                  attributes: options
    /runs/<ranks>/<context>  attributes: sent_bytes and sent_messages of the rank that sends most,
                             parts, passed
        checks/<...>         attributes: error, bound, rows, passed
        seconds              (trials, ranks, parts) seconds of steps
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core import reference
from a2d_mpi.experiments.benchmark import measured, within
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.files import Check
from a2d_mpi.experiments.hdf5 import check_output
from a2d_mpi.experiments.ranks import check_room
from a2d_mpi.gpt.apart import (
    MICRO_BATCHES,
    attention_grid,
    open_apart,
    step_traffic_apart,
    weights_of_rank,
)
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.cost import cache_bytes
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.steps import step_traffic

SCHEMA = ("a2d_mpi decoding", 1)
PARTS = ("attention", "merge", "other")  # of a step's seconds
COLUMNS = ("ranks", "context", "step", *PARTS, "sent bytes", "messages")
BOUND = 1e-4  # largest error of attention, relative to its largest value
SIZES = ("layers", "width", "nheads", "nheads_kv", "headdim", "requests", "trials", "seed")
BLOCK, UNLIMITED = 16, 1 << 30  # tokens of a block of the cache, and blocks of a rank
# Numbers of attention ranks and FFN ranks.  Without FFN ranks all are alike.
Split = tuple[int, int]


def bench_decode(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure all contexts on all numbers of ranks; return the exit code."""
    config = together(comm, lambda: _validated(comm, args))
    what = f"{args.requests} requests (--requests) of {max(args.contexts)} tokens (--contexts)"
    most = -(-args.requests // min(args.ranks)) * (max(args.contexts) + args.trials + 1) + BLOCK
    # The keys of a request are drawn whole, and checked in float64.
    keys = 24 * config.nheads_kv * config.headdim * max(args.contexts)
    nbytes = cache_bytes(config, most, 4) + 4 * config.parameters + keys
    check_room(comm, f"{config.parameters} parameters and the cache of {what} on one rank", nbytes)
    splits = [*((x, 0) for x in args.ranks), *(args.apart or ())]
    runs = {
        f"{_label(split)}/{context}": partial(_run, comm, split, config, args, context)
        for split in splits
        for context in args.contexts
    }
    if comm.rank == 0:
        print(f"{args.requests} requests, {args.layers} layers; milliseconds of a step, medians")
    sizes = {x: getattr(args, x) for x in SIZES}
    return measured(comm, COLUMNS, runs, args.output, SCHEMA, sizes)


def _label(split: Split) -> str:
    return "+".join(str(x) for x in split if x)


def _run(
    comm: MPI.Intracomm, split: Split, config: GPTConfig, args: argparse.Namespace, context: int
) -> tuple[dict[str, object], Sequence[str], dict[str, Check]]:
    """Measure a context on some of the ranks; return the run, its row and its checks."""
    part = comm.Split(0 if comm.rank < sum(split) else MPI.UNDEFINED, comm.rank)
    if part == MPI.COMM_NULL:
        return {}, (), {}
    with threadpool_limits(args.threads):
        run, checks = _measured(part, split, config, args, context)
    part.Free()
    seconds = 1e3 * run["seconds"]  # (trials, ranks, parts)
    step = np.median(seconds.sum(axis=2).max(axis=1))
    numbers = (f"{x:.2f}" for x in (step, *np.median(seconds.mean(axis=1), axis=0)))
    traffic = f"{run['sent_bytes']}", f"{run['sent_messages']}"
    return run, (_label(split), f"{context}", *numbers, *traffic), checks


def _measured(
    comm: MPI.Intracomm, split: Split, config: GPTConfig, args: argparse.Namespace, context: int
) -> tuple[dict[str, object], dict[str, Check]]:
    """Check and time steps after a context of random keys and values.

    What rank 0 returns counts.
    """
    names, (ranks, ffn_ranks) = list(range(args.requests)), split
    rooms = [UNLIMITED] * ranks
    grid = attention_grid(comm, split, (1, ranks, 1)) if ffn_ranks else ProcessGrid(comm, 1, ranks)
    weights = Parameters(config, initial(config, args.seed, "float32"))
    if ffn_ranks:
        weights = Parameters(config, *weights_of_rank(weights, comm.rank, split))
        decoder = open_apart(comm, grid, split, weights, rooms, BLOCK)
    else:
        decoder = Decoder(grid, weights, rooms, BLOCK)
    for name in names:
        decoder.table.admit(name, context + args.trials + 1)
        owners = np.array(decoder.table.append(name, context))
        for layer in range(config.layers) if grid else ():
            k, v = _keys(config, args.seed, context, name, layer)[:, owners == comm.rank]
            decoder.cache.put(layer, name, k, v)
    shape = args.requests, config.nheads, config.headdim
    q = np.random.default_rng(args.seed).standard_normal(shape, np.float32)
    out = decoder.attention.attend(config.layers - 1, names, q) if grid else None
    spent = decoder.attention.seconds if grid else dict.fromkeys(PARTS, 0.0)
    seconds, sent = [], set()
    for _ in range(args.trials + 1):
        before, counted = dict(spent), decoder.sent
        comm.Barrier()
        start = time.perf_counter()
        decoder.step(dict.fromkeys(names, 1))
        total = time.perf_counter() - start
        attention, merge = (spent[x] - before[x] for x in PARTS[:2])
        seconds.append([attention, merge, total - attention - merge])
        sent.add(tuple(b - a for a, b in zip(counted, decoder.sent)))
    decoder.free()
    if grid:
        grid.free()
    if ffn_ranks:
        at = comm.rank, (ranks, 1), ffn_ranks
        predicted = step_traffic_apart(config, *at, args.requests, MICRO_BATCHES, 4)
    else:
        predicted = step_traffic(config, ranks, 1, args.requests, 4)
    off = max(abs(a - b) for x in sent for a, b in zip(x, predicted))
    checks = {"traffic": Check(float(comm.allreduce(off, op=MPI.MAX)), 0.0, comm.size)}
    nbytes, messages = (comm.allreduce(x, op=MPI.MAX) for x in max(sent))
    of_ranks = comm.gather(seconds[1:]) or [seconds[1:]]  # the first step is the warm-up
    if comm.rank == 0:
        checks["out"] = _check(config, args, context, q, out)
    run = {
        "sent_bytes": nbytes,
        "sent_messages": messages,
        "parts": list(PARTS),
        "seconds": np.array(of_ranks).swapaxes(0, 1),
    }
    return run, checks


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


def _validated(comm: MPI.Intracomm, args: argparse.Namespace) -> GPTConfig:
    """Refuse options that do not fit, and choose the default number of ranks and headdim."""
    if args.ranks is None:
        args.ranks = [1 << i for i in range(comm.size.bit_length())]
    if max(args.ranks) > comm.size:
        raise ValueError(f"--ranks must be at most {comm.size}, got {args.ranks}")
    for x in args.apart or ():
        if min(x) < 1 or sum(x) > comm.size:
            raise ValueError(
                f"--apart must be at least 1+1 ranks and at most {comm.size} together, "
                f"got {x[0]}+{x[1]}"
            )
    if comm.rank == 0:
        check_output(args.output, SCHEMA)
    most = max(args.contexts) + args.trials + 1
    sizes = args.layers, args.width, args.nheads, most, args.nheads_kv
    config = GPTConfig(256, *sizes, positions="rotary", headdim=args.headdim)
    args.headdim = config.headdim
    return config
