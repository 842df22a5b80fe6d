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
from a2d_mpi.gpt.cost import cache_bytes
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.serve import sample, serve


def generate(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Generate; returns the exit code: 1 if a request was refused."""
    prompts = together(comm, lambda: _prompts(args))
    state = comm.bcast(together(comm, lambda: _state(args.checkpoint), on=0))
    agree(comm, None if state else f"{args.checkpoint} has no checkpoint that is whole")
    rows, cols = together(comm, lambda: grid_shape(comm.size, args.rows, args.cols, args.heads))
    device = open_device(comm, args.device)
    grid = ProcessGrid(comm, rows, cols, args.heads)
    weights = Parameters(state.config, device.upload(state.weights))
    rooms = args.room if args.room is not None else [1 << 30] * (rows * cols)
    arrive = args.arrive if args.arrive is not None else [0] * len(prompts)
    wrong = f"--arrive must be a number for each of the {len(prompts)} prompts, got {arrive}"
    agree(comm, wrong if len(arrive) != len(prompts) else None)
    options = args.block, args.method, args.transfers, args.kernel
    decoder = Decoder(grid, weights, rooms, *options)
    new = dict.fromkeys(prompts, args.tokens)
    most = [min(len(x) + args.tokens, state.config.seqlen) for x in prompts.values()]
    blocks = min(max(rooms), -(-sum(map(decoder.table.blocks, most)) // len(rooms)))
    nbytes = cache_bytes(state.config, blocks * args.block, state.weights.itemsize) // args.heads
    tokens = f"{blocks * args.block} tokens of keys and values on one rank (--tokens, --block)"
    check_room(comm, tokens, nbytes)

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
    grid.free()
    return FAILED_CHECK if refused else 0


def _prompts(args: argparse.Namespace) -> dict[int, np.ndarray]:
    """Bytes of each prompt."""
    texts = [x.encode(errors="surrogateescape") for x in args.prompt]
    if not all(texts):
        raise ValueError("--prompt must not be empty")
    return {i: np.frombuffer(x, np.uint8).astype(np.int64) for i, x in enumerate(texts)}


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
