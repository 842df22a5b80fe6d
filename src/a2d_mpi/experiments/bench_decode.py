"""The job of drivers/bench_decode.py: seconds, bytes and messages of a decoding step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core import reference
from a2d_mpi.experiments.benchmark import Entry, write_entries
from a2d_mpi.experiments.cli import check_room, together
from a2d_mpi.experiments.hdf5 import check_output
from a2d_mpi.experiments.measure import origin_of
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.results import Check
from a2d_mpi.experiments.tables import aligned
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.cost import cache_bytes
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters, initial
from a2d_mpi.gpt.steps import step_traffic

SCHEMA = ("a2d_mpi decoding", 1)
PARTS = ("attention", "merge", "other", "cpu")  # of a step's seconds; cpu: of attention's
BOUND = 1e-4  # largest error of attention, relative to its largest value
SIZES = ("layers", "width", "nheads", "nheads_kv", "requests", "block", "heads", "trials", "seed")


def bench_decode(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure all contexts on all numbers of ranks; returns the exit code."""
    config = together(comm, lambda: _validated(comm, args))
    what = (
        f"{config.parameters} parameters (--layers, --width) and the cache of {args.requests} "
        f"requests (--requests) of {max(args.contexts)} tokens (--contexts)"
    )
    for ranks in args.ranks:
        check_room(comm, f"{what} on one of {ranks} ranks", _room(config, args, ranks), ranks)
    origin, entries = origin_of(comm), {}
    for ranks in tqdm(args.ranks, "ranks", disable=comm.rank != 0 or None, leave=False):
        part = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED, comm.rank)
        if part != MPI.COMM_NULL:
            grid = ProcessGrid(part, 1, ranks // args.heads, args.heads)
            with threadpool_limits(args.threads):
                for context in args.contexts:
                    entries |= _measured(grid, config, args, context)
            grid.free()
            part.Free()
        together(comm, lambda: None, on=0)  # the other ranks sleep until then
    if args.output:
        about = {"/": Entry(origin, {}), "config": Entry({x: getattr(args, x) for x in SIZES}, {})}
        together(
            comm, lambda: write_entries(args.output, SCHEMA, about | entries, extend=False), on=0
        )
    return comm.bcast(_report(args, entries) if comm.rank == 0 else None)


def _measured(
    grid: ProcessGrid, config: GPTConfig, args: argparse.Namespace, context: int
) -> dict[str, Entry]:
    """Groups of steps after a context of random keys and values, checked and timed."""
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
    shape = args.requests, config.nheads, config.headdim
    q = np.random.default_rng(args.seed).standard_normal(shape, np.float32)
    out = decoder.attention.attend(config.layers - 1, names, q)
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
    off = comm.allreduce(off, op=MPI.MAX)
    nbytes = comm.allreduce(decoder.cache.nbytes, op=MPI.MAX)
    of_ranks = comm.gather(seconds[1:])  # the first one warms up
    decoder.free()
    if of_ranks is None:
        return {}
    run, kinds = f"runs/{comm.size}/{context}", ("bytes", "messages")
    counts = {
        **{f"sent_{x}": n for x, n in zip(kinds, max(sent))},
        **{f"predicted_{x}": n for x, n in zip(kinds, predicted)},
        "cache_bytes": nbytes,
        "parts": PARTS,
    }
    checks = {
        "out": _checked(config, args, context, q, out),
        "traffic": Check(float(off), 0.0, comm.size),
    }
    entries = {run: Entry(counts, {"seconds": np.array(of_ranks).swapaxes(0, 1)})}
    for name, check in checks.items():
        entries[f"{run}/checks/{name}"] = Entry({**vars(check), "passed": check.passed}, {})
    return entries


def _keys(config: GPTConfig, seed: int, *which: int) -> np.ndarray:
    """Random keys and values, (2, tokens, Hkv, D), of a context, request and layer."""
    shape = 2, which[0], config.nheads_kv, config.headdim
    return np.random.default_rng([seed, *which]).standard_normal(shape, np.float32)


def _checked(
    config: GPTConfig, args: argparse.Namespace, context: int, q: np.ndarray, out: np.ndarray
) -> Check:
    """Compare attention of the last request's row in the last layer with float64."""
    name = args.requests - 1
    k, v = _keys(config, args.seed, context, name, config.layers - 1)
    visible = np.ones((1, context), bool)
    exact, _ = reference.attention(q[[name]], k, v, visible, config.headdim**-0.5)
    error = np.abs(out[name] - exact[0]).max()
    return Check(float(error), BOUND * float(np.abs(exact).max()), 1)


def _report(args: argparse.Namespace, entries: Mapping[str, Entry]) -> int:
    """Print the table: medians over the trials; returns the exit code."""
    print(f"{args.requests} requests, {args.layers} layers; milliseconds of a step, medians")
    rows = [["ranks", "context", "step", *PARTS, "sent bytes", "messages", "cache MB"]]
    failed = []
    for name, entry in entries.items():
        _, ranks, context, *check = name.split("/")
        a = entry.attributes
        if not check:
            seconds = 1e3 * entry.arrays["seconds"]  # (trials, ranks, parts)
            step = np.median(seconds[..., :3].sum(axis=2).max(axis=1))
            parts = np.median(seconds.mean(axis=1), axis=0)
            numbers = [f"{x:.2f}" for x in (step, *parts)]
            counts = str(a["sent_bytes"]), str(a["sent_messages"])
            rows.append([ranks, context, *numbers, *counts, f"{a['cache_bytes'] / 1e6:.1f}"])
        elif not a["passed"]:
            failed.append(
                f"FAILED {ranks} ranks, {context} tokens, {check[-1]}: {a['error']:.2e}, bound "
                f"{a['bound']:.2e}"
            )
    print(aligned(rows, left=()))
    print("\n".join(failed) or "all checks passed")
    return FAILED_CHECK if failed else 0


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
