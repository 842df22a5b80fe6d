"""The job of drivers/generate.py: text from a checkpoint, its cache spread over all ranks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
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
from a2d_mpi.experiments.survival import check_survive, surviving
from a2d_mpi.gpt.cost import cache_bytes
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.serve import Service, sample


def generate(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Generate; returns the exit code: 1 if a request was refused."""
    check_survive(comm, args.survive)
    prompts = together(comm, lambda: _prompts(args))
    state = comm.bcast(together(comm, lambda: _state(args.checkpoint), on=0))
    agree(comm, None if state else f"{args.checkpoint} has no checkpoint that is whole")
    rows, cols = together(comm, lambda: grid_shape(comm.size, args.rows, args.cols, args.heads))
    device = open_device(comm, args.device)
    arrive = args.arrive if args.arrive is not None else [0] * len(prompts)
    wrong = f"--arrive must be a number for each of the {len(prompts)} prompts, got {arrive}"
    agree(comm, wrong if len(arrive) != len(prompts) else None)
    rooms = args.room if args.room is not None else [1 << 30] * (rows * cols)
    wrong = f"--room must be a number for each of the {rows * cols} positions, got {rooms}"
    agree(comm, wrong if len(rooms) != rows * cols else None)
    grid = ProcessGrid(comm, rows, cols, args.heads)
    weights = Parameters(state.config, device.upload(state.weights))
    room_of = dict(zip(grid.failures.numbers, np.repeat(rooms, args.heads).tolist()))
    answers = _Answers(args, weights, prompts, dict(enumerate(arrive)), room_of)
    with threadpool_limits(args.threads):
        code = surviving("generate.py", grid, answers.complete, args.survive, args.method)
    if code is None:
        return 0
    answers.report()
    return code


class _Answers:
    """Answers to prompts, which the first rank prints as they are done.

    Parameters
    ----------
    args : Namespace
        Of drivers/generate.py.
    weights : Parameters
    prompts : dict of int to (n,) int64
    arrive : dict of int to int
        Step at which each prompt comes.
    room_of : dict of int to int
        Blocks that a rank has room for, by its number in the first grid.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        weights: Parameters,
        prompts: Mapping[int, np.ndarray],
        arrive: Mapping[int, int],
        room_of: Mapping[int, int],
    ) -> None:
        self._args, self._weights, self._prompts = args, weights, prompts
        self._room_of = room_of
        new = dict.fromkeys(prompts, args.tokens)
        self._service = Service(prompts, new, self._choose, arrive)
        self._decoder: Decoder | None = None
        self._latest: list[tuple[int, np.ndarray | ValueError]] = []  # answers of a step
        self._first: int | None = None  # number of the rank that prints
        self._prints = False
        self._tokens, self._refused = 0, 0
        self._start, self._seconds = time.perf_counter(), 0.0

    def complete(self, grid: ProcessGrid, comm: MPI.Intracomm) -> int:
        """Answer what is not answered yet; returns the exit code.  Collective."""
        args, numbers = self._args, grid.failures.numbers
        if self._decoder:
            self._decoder.free()
            self._decoder = None
        positions = np.reshape(numbers, (-1, grid.heads)).tolist()
        rooms = [min(self._room_of[x] for x in ranks) for ranks in positions]
        options = args.block, args.method, args.transfers, args.kernel
        self._decoder = Decoder(grid, self._weights, rooms, *options)
        self._check_room(comm, rooms, grid.heads)
        self._service.use(self._decoder)
        printed_by, self._first = self._first, numbers[0]
        self._prints = comm.rank == 0
        if printed_by != self._first:  # it may have died before it printed them
            self._print_latest()
        while self._service.unanswered:
            self._latest = self._service.step()
            for _, answer in self._latest:
                refused = isinstance(answer, ValueError)
                self._refused += refused
                self._tokens += 0 if refused else len(answer)
            self._print_latest()
        self._seconds = time.perf_counter() - self._start
        return FAILED_CHECK if self._refused else 0

    def _check_room(self, comm: MPI.Intracomm, rooms: Sequence[int], heads: int) -> None:
        """Refuse a cache for which a node has too little memory."""
        args, config = self._args, self._weights.config
        most = [min(len(x) + args.tokens, config.seqlen) for x in self._prompts.values()]
        blocks = min(max(rooms), -(-sum(map(self._decoder.table.blocks, most)) // len(rooms)))
        nbytes = cache_bytes(config, blocks * args.block, self._weights.flat.itemsize) // heads
        tokens = f"{blocks * args.block} tokens of keys and values on one rank (--tokens, --block)"
        check_room(comm, tokens, nbytes)

    def _choose(self, name: int, length: int, logits: np.ndarray) -> int:
        args = self._args
        return sample(logits, args.temperature, args.top_k, (args.seed, name, length))

    def _print_latest(self) -> None:
        """Print the latest answers, on the first rank."""
        for name, answer in self._latest if self._prints else ():
            if isinstance(answer, ValueError):
                print(f"{name}: refused: {answer}", flush=True)
            else:
                print(f"{name}: {_text(self._prompts[name]) + _text(answer)!r}", flush=True)

    def report(self) -> None:
        """Print the speed, on the first rank, and free the decoder.  Collective."""
        if self._prints:
            nbytes, messages = self._decoder.sent
            print(f"{self._tokens} tokens in {self._seconds:.2f} s, "
                  f"{self._tokens / self._seconds:.1f} tokens/s; rank 0 sent {nbytes} bytes in "
                  f"{messages} messages in decoding steps")  # fmt: skip
        self._decoder.free()


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
