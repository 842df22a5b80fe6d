"""The job of drivers/generate.py: text from a checkpoint, its cache spread over all ranks."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.experiments.checkpoint import State, latest, load
from a2d_mpi.experiments.cli import check_room, together
from a2d_mpi.experiments.grids import grid_shape
from a2d_mpi.experiments.measure import open_device
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.gpt.apart import MICRO_BATCHES, attention_grid, open_apart, part_of
from a2d_mpi.gpt.cost import cache_bytes
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.serve import sample, serve


def generate(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Generate; returns the exit code: 1 if a request was refused."""
    prompts = together(comm, lambda: _prompts(args))
    split = together(comm, lambda: _split(args))
    ranks = split[0] if split else comm.size
    rows, cols = together(comm, lambda: grid_shape(ranks, args.rows, args.cols, args.heads))
    shape = rows, cols, args.heads
    grid = attention_grid(comm, split, shape) if split else ProcessGrid(comm, *shape)
    weights = _weights(comm, args, split)
    config = weights.config
    rooms = args.room if args.room is not None else [1 << 30] * (rows * cols)
    arrive = args.arrive if args.arrive is not None else [0] * len(prompts)
    wrong = f"--arrive must be a number for each of the {len(prompts)} prompts, got {arrive}"
    agree(comm, wrong if len(arrive) != len(prompts) else None)
    options = args.block, args.method, args.transfers, args.kernel
    if split:
        batches = args.micro_batches or MICRO_BATCHES
        decoder = open_apart(comm, grid, split, weights, rooms, *options, batches)
    else:
        decoder = Decoder(grid, weights, rooms, *options)
    new = dict.fromkeys(prompts, args.tokens)
    most = [min(len(x) + args.tokens, config.seqlen) for x in prompts.values()]
    blocks = min(max(rooms), -(-sum(map(decoder.table.blocks, most)) // len(rooms)))
    nbytes = cache_bytes(config, blocks * args.block, weights.flat.dtype.itemsize) // args.heads
    tokens = f"{blocks * args.block} tokens of keys and values on one rank (--tokens, --block)"
    check_room(comm, tokens, nbytes, ranks)

    def choose(name: int, length: int, logits: np.ndarray) -> int:
        return sample(logits, args.temperature, args.top_k, (args.seed, name, length))

    start, refused, tokens = time.perf_counter(), 0, 0
    with threadpool_limits(args.threads):
        for name, answer in serve(decoder, prompts, new, choose, dict(enumerate(arrive))):
            if isinstance(answer, ValueError):
                refused += 1
                shown = f"refused: {answer}"
            else:
                tokens += len(answer)
                shown = repr(_text(prompts[name]) + _text(answer))
            if comm.rank == 0:
                print(f"{name}: {shown}", flush=True)
    seconds = time.perf_counter() - start
    if comm.rank == 0:
        nbytes, messages = decoder.sent
        print(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s; rank 0 sent "
              f"{nbytes} bytes in {messages} messages in decoding steps")  # fmt: skip
    decoder.free()
    if grid:
        grid.free()
    return FAILED_CHECK if refused else 0


def _prompts(args: argparse.Namespace) -> dict[int, np.ndarray]:
    """Bytes of each prompt."""
    texts = [x.encode(errors="surrogateescape") for x in args.prompt]
    if not all(texts):
        raise ValueError("--prompt must not be empty")
    return {i: np.frombuffer(x, np.uint8).astype(np.int64) for i, x in enumerate(texts)}


def _split(args: argparse.Namespace) -> tuple[int, int] | None:
    """Attention ranks and FFN ranks; None if all ranks are alike."""
    split = args.attention_ranks, args.ffn_ranks
    if None not in split:
        return split
    if split != (None, None) or args.micro_batches:
        raise ValueError(
            "--attention-ranks and --ffn-ranks need each other, and --micro-batches both"
        )
    return None


def _weights(
    comm: MPI.Intracomm, args: argparse.Namespace, split: tuple[int, int] | None
) -> Parameters:
    """What this rank holds of the weights: all, or those of its kind."""
    state = together(comm, lambda: _state(args.checkpoint), on=0)
    config = comm.bcast(state and state.config)
    agree(comm, None if config else f"{args.checkpoint} has no checkpoint that is whole")
    device = open_device(comm, args.device)
    if split is None:
        return Parameters(config, device.upload(comm.bcast(state and state.weights)))
    parts = None
    if state:
        weights = Parameters(config, state.weights)
        parts = [part_of(weights, rank, split) for rank in range(comm.size)]
    flat, shapes = comm.scatter(parts)
    return Parameters(config, device.upload(flat), shapes)


def _state(path: Path) -> State | None:
    """The checkpoint of a file, or the latest whole one of a folder; damaged ones are named."""
    if not path.is_dir():
        return load(path)
    state, refused = latest(path)
    for why in refused.values():
        print(f"refused: {why}", file=sys.stderr, flush=True)
    return state


def _text(tokens: np.ndarray) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")
