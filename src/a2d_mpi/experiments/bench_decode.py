"""The job of drivers/bench_decode.py: seconds, bytes and messages of a decoding step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core import reference
from a2d_mpi.experiments.check import error_bounds
from a2d_mpi.experiments.cli import check_room, together
from a2d_mpi.experiments.hdf5 import check_output
from a2d_mpi.experiments.measure import origin_of
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.results import Check, new_file, set_attributes, write_checks
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.cost import cache_bytes
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.steps import step_traffic

SCHEMA = ("a2d_mpi decoding", 1)
PARTS = ("attention", "merge", "other", "cpu")  # of a step's seconds; cpu: of attention's
SIZES = ("layers", "width", "nheads", "nheads_kv", "requests", "block", "heads", "trials", "seed")


@dataclass
class Measured:
    """Steps of one context on some ranks.

    Attributes
    ----------
    ranks, context : int
    seconds : (trials, ranks, parts) float
        By `PARTS`.
    counts : dict of str to int
        Bytes and messages of a step, the most that a rank sent and `step_traffic`, and bytes of
        the largest cache.
    checks : dict of str to Check
    """

    ranks: int
    context: int
    seconds: np.ndarray
    counts: dict[str, int]
    checks: dict[str, Check]


def bench_decode(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure all contexts on all numbers of ranks; returns the exit code."""
    config = together(comm, lambda: _validated(comm, args))
    what = (
        f"{config.parameters} parameters (--layers, --width) and the cache of {args.requests} "
        f"requests (--requests) of {max(args.contexts)} tokens (--contexts)"
    )
    for ranks in args.ranks:
        check_room(comm, f"{what} on one of {ranks} ranks", _room(config, args, ranks), ranks)
    runs: list[Measured] = []
    origin = origin_of(comm)
    if comm.rank == 0:
        print(f"{args.requests} requests, {config.layers} layers; milliseconds of a step, "
              "medians\n"
              "ranks  context     step" + "".join(f"{x:>11}" for x in PARTS)
              + "  sent bytes  messages  cache MB")  # fmt: skip
    for ranks in args.ranks:
        part = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED, comm.rank)
        if part != MPI.COMM_NULL:
            grid = ProcessGrid(part, 1, ranks // args.heads, args.heads)
            with threadpool_limits(args.threads):
                for context in args.contexts:
                    runs.append(_measured(grid, config, args, context))
                    if comm.rank == 0:
                        print(_line(runs[-1]), flush=True)
            grid.free()
            part.Free()
        together(comm, lambda: None, on=0)  # the other ranks sleep until then
    if args.output:
        together(comm, lambda: _write(args, runs, origin), on=0)
    failed = [f"{x.ranks} ranks, {x.context} tokens, {name}: {check.error:.2e}, bound "
              f"{check.bound:.2e}" for x in runs for name, check in x.checks.items()
              if not check.passed]  # fmt: skip
    if comm.rank == 0:
        print("\n".join(f"FAILED {x}" for x in failed) or "all checks passed")
    return comm.bcast(FAILED_CHECK if failed else 0)


def _measured(
    grid: ProcessGrid, config: GPTConfig, args: argparse.Namespace, context: int
) -> Measured:
    """Steps after a context of random keys and values, checked and timed."""
    comm, names = grid.comm, list(range(args.requests))
    weights = Parameters(config, initial(config, args.seed, "float32"))
    positions = grid.group_comm.size
    decoder = Decoder(grid, weights, [1 << 30] * positions, args.block)
    for name in names:
        decoder.table.admit(name, context + args.trials + 1)
        own = np.array(decoder.table.append(name, context)) == decoder.cache.rank
        for layer in range(config.layers):
            k, v = _keys(config, args.seed, context, name, layer)[:, own]
            kept = decoder.attention.heads_kv
            decoder.cache.put(layer, name, k[:, kept], v[:, kept])
    checks = _checked(decoder, config, args, context, comm)
    seconds, sent = [], set()
    for _ in range(args.trials + 1):
        before, counted = dict(decoder.attention.seconds), decoder.sent
        comm.Barrier()
        start = time.perf_counter()
        decoder.step(dict.fromkeys(names, 1))
        total = time.perf_counter() - start
        parts = {x: y - before[x] for x, y in decoder.attention.seconds.items()}
        parts["other"] = total - parts["attention"] - parts["merge"]
        seconds.append([parts[x] for x in PARTS])
        sent.add(tuple(b - a for a, b in zip(counted, decoder.sent)))
    predicted = step_traffic(config, positions, grid.heads, args.requests, 4)
    off = max(abs(a - b) for x in sent for a, b in zip(x, predicted))
    checks["traffic"] = Check(float(comm.allreduce(off, op=MPI.MAX)), 0.0, comm.size)
    nbytes = comm.allreduce(decoder.cache.nbytes, op=MPI.MAX)
    every_rank = np.array(comm.allgather(seconds[1:])).swapaxes(0, 1)  # the first one warms up
    decoder.free()
    names = ("sent_bytes", "sent_messages", "predicted_bytes", "predicted_messages", "cache_bytes")
    counts = dict(zip(names, (*max(sent), *predicted, nbytes)))
    return Measured(comm.size, context, every_rank, counts, checks)


def _keys(config: GPTConfig, seed: int, *which: int) -> np.ndarray:
    """Random keys and values, (2, tokens, Hkv, D), of a context, request and layer."""
    shape = 2, which[0], config.nheads_kv, config.headdim
    return np.random.default_rng([seed, *which]).standard_normal(shape, np.float32)


def _checked(
    decoder: Decoder,
    config: GPTConfig,
    args: argparse.Namespace,
    context: int,
    comm: MPI.Intracomm,
) -> dict[str, Check]:
    """Attention of random queries in the last layer, against float64, of one request."""
    layer, name, scale = config.layers - 1, args.requests - 1, config.headdim**-0.5
    shape = args.requests, config.nheads, config.headdim
    q = np.random.default_rng(args.seed).standard_normal(shape, np.float32)
    out = decoder.attention.attend(layer, list(range(args.requests)), q)[name]
    if comm.rank != 0:
        return {"out": comm.bcast(None)}
    k, v = _keys(config, args.seed, context, name, layer)
    given = q[[name]], k, v, np.ones((1, context), bool), scale
    exact, lse = reference.attention(*given)
    plain, _ = reference.attention(*given, np.float32)
    norms = {x: float(np.linalg.norm(y, axis=-1).max()) for x, y in zip("qkv", given)}
    largest = {"out": float(np.abs(exact).max()), "lse": float(np.abs(lse).max())}
    same = {"out": float(np.abs(plain - exact).max()), "lse": 0.0}
    bounds = error_bounds(np.dtype("f4"), scale, norms, largest, same)
    return {"out": comm.bcast(Check(float(np.abs(out - exact).max()), bounds["out"], 1))}


def _line(run: Measured) -> str:
    usual = 1e3 * np.median(run.seconds.mean(axis=1), axis=0)  # (parts,)
    step = 1e3 * np.median(run.seconds[..., :3].sum(axis=2).max(axis=1))
    return (f"{run.ranks:>5}{run.context:>9}{step:>9.2f}" + "".join(f"{x:>11.2f}" for x in usual)
            + f"{run.counts['sent_bytes']:>12}{run.counts['sent_messages']:>10}"
              f"{run.counts['cache_bytes'] / 1e6:>10.1f}")  # fmt: skip


def _validated(comm: MPI.Intracomm, args: argparse.Namespace) -> GPTConfig:
    """Refuse options that do not fit, and choose the default number of ranks."""
    if args.ranks is None:
        args.ranks = [args.heads << i for i in range(comm.size.bit_length())]
        args.ranks = [x for x in args.ranks if x <= comm.size]
    if not args.ranks or max(args.ranks) > comm.size or any(x % args.heads for x in args.ranks):
        raise ValueError(
            f"--ranks must be multiples of --heads {args.heads} and at most {comm.size}, "
            f"got {args.ranks}"
        )
    if args.output and comm.rank == 0:
        check_output(args.output, SCHEMA)
    most = max(args.contexts) + args.trials + 1
    sizes = args.layers, args.width, args.nheads, most, args.nheads_kv
    return GPTConfig(256, *sizes, positions="rotary")


def _room(config: GPTConfig, args: argparse.Namespace, ranks: int) -> int:
    """Bytes of one of so many ranks: weights, cache, and the check of one request."""
    blocks = -(-config.seqlen // args.block) * args.requests
    kept = args.block * -(-blocks // (ranks // args.heads))
    # Random keys in float32, their copy in float64, scores of a query, and the table of tokens.
    keys = config.nheads_kv * config.headdim
    token = 2 * 4 * keys + 2 * 8 * keys + 4 * 8 * config.nheads + 40
    nbytes = cache_bytes(config, kept, 4) // args.heads
    return nbytes + 4 * config.parameters + token * max(args.contexts)


def _write(args: argparse.Namespace, runs: list[Measured], origin: Mapping[str, object]) -> None:
    with new_file(args.output, SCHEMA) as file:
        set_attributes(file, origin)
        set_attributes(file.create_group("config"), {x: getattr(args, x) for x in SIZES})
        for run in runs:
            group = file.create_group(f"runs/{run.ranks}/{run.context}")
            group["seconds"] = run.seconds
            group["seconds"].attrs["parts"] = PARTS
            set_attributes(group, run.counts)
            write_checks(group, run.checks)
