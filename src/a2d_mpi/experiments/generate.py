"""The program of drivers/generate.py: text from a checkpoint, with a cache on all ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.experiments.checkpoint import State, latest, load
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.grids import grid_shape
from a2d_mpi.experiments.measure import open_device
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.ranks import check_survive, surviving
from a2d_mpi.gpt.apart import MICRO_BATCHES, attention_grid, open_apart, weights_of_rank
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.serve import Service, sample
from a2d_mpi.gpt.text import VOCAB


def generate(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Generate text; return the exit code: 1 if a request was refused."""
    check_survive(comm, args.survive)
    prompts = together(comm, lambda: _prompts(args))
    split = together(comm, lambda: _split(args, comm.size))
    ranks = split[0] if split else comm.size
    rows, cols = grid_shape(ranks, args.rows, args.cols, args.head_ranks)
    shape = rows, cols, args.head_ranks
    grid = attention_grid(comm, split, shape) if split else ProcessGrid(comm, *shape)
    weights = _weights(comm, args, split)
    rooms = args.room if args.room is not None else [1 << 30] * (rows * cols)
    wrong = f"--room must be a number for each of the {rows * cols} positions, got {rooms}"
    agree(comm, wrong if len(rooms) != rows * cols else None)
    answers = _Answers(args, weights, prompts)
    options = {"method": args.method, "transfers": args.transfers, "kernel": args.kernel}
    options["block"] = args.kv_block
    with threadpool_limits(args.threads):
        if split:
            options["micro_batches"] = args.micro_batches or MICRO_BATCHES
            decoder = open_apart(comm, grid, split, weights, rooms, **options)
            code = answers.complete(decoder, comm, first=0)
            if grid:
                grid.free()
        else:
            room_of = dict(zip(grid.failures.numbers, np.repeat(rooms, args.head_ranks).tolist()))

            def work(grid: ProcessGrid, comm: MPI.Intracomm) -> int:
                numbers = grid.failures.numbers
                positions = np.reshape(numbers, (-1, grid.heads)).tolist()
                rooms = [min(room_of[x] for x in ranks) for ranks in positions]
                answers.free()
                decoder = Decoder(grid, weights, rooms, **options)
                return answers.complete(decoder, comm, first=numbers[0])

            code = surviving("generate.py", grid, work, args.survive, args.method)
    if code is None:
        return 0
    answers.free()
    return code


class _Answers:
    """Answers to prompts; the first rank prints each answer when it is complete.

    Parameters
    ----------
    args : Namespace
        Options of drivers/generate.py.
    weights : Parameters
    prompts : dict of int to (n,) int64
        Tokens of each prompt.
    """

    def __init__(
        self, args: argparse.Namespace, weights: Parameters, prompts: Mapping[int, np.ndarray]
    ) -> None:
        self._args, self._weights, self._prompts = args, weights, prompts
        new = dict.fromkeys(prompts, args.tokens)
        self._service = Service(prompts, new, self._choose)
        self._decoder: Decoder | None = None
        self._latest: list[tuple[int, np.ndarray | ValueError]] = []  # answers of the latest step
        self._first: int | None = None  # rank, in the first grid, that prints
        self._prints = False
        self._refused = 0

    def complete(self, decoder: Decoder, comm: MPI.Intracomm, first: int) -> int:
        """Serve all unanswered prompts; return the exit code.  Collective.

        `first` is the rank, in the first grid, that prints.
        """
        self._decoder = decoder
        self._service.use(decoder)
        printed_by, self._first = self._first, first
        self._prints = comm.rank == 0
        if printed_by != self._first:  # the earlier rank may have died before it printed them
            self._print_latest()
        while self._service.unanswered:
            self._latest = self._service.step()
            self._refused += sum(isinstance(answer, ValueError) for _, answer in self._latest)
            self._print_latest()
        return FAILED_CHECK if self._refused else 0

    def _choose(self, name: int, length: int, logits: np.ndarray) -> int:
        return sample(logits, self._args.temperature, (self._args.seed, name, length))

    def _print_latest(self) -> None:
        """Print the latest answers, on the first rank."""
        for name, answer in self._latest if self._prints else ():
            if isinstance(answer, ValueError):
                print(f"{name}: refused: {answer}", flush=True)
            else:
                print(f"{name}: {_text(self._prompts[name]) + _text(answer)!r}", flush=True)

    def free(self) -> None:
        """Free the decoder, if there is one.  Collective, also after a loss."""
        if self._decoder:
            self._decoder.free()
            self._decoder = None


def _prompts(args: argparse.Namespace) -> dict[int, np.ndarray]:
    """Return the bytes of each prompt as tokens."""
    texts = [x.encode(errors="surrogateescape") for x in args.prompt]
    if not all(texts):
        raise ValueError("--prompt must not be empty")
    return {i: np.frombuffer(x, np.uint8).astype(np.int64) for i, x in enumerate(texts)}


def _split(args: argparse.Namespace, ranks: int) -> tuple[int, int] | None:
    """Return the numbers of attention ranks and FFN ranks; None if all ranks are alike."""
    if args.ffn_ranks is None:
        if args.micro_batches:
            raise ValueError("--micro-batches needs --ffn-ranks")
        return None
    if args.survive:
        raise ValueError("--survive and --ffn-ranks cannot be combined")
    return ranks - args.ffn_ranks, args.ffn_ranks


def _weights(
    comm: MPI.Intracomm, args: argparse.Namespace, split: tuple[int, int] | None
) -> Parameters:
    """Return the weights of this rank: all, or the weights of an attention or FFN rank."""
    state = together(comm, lambda: _state(args.checkpoint), on=0)
    config = comm.bcast(state and state.config)
    agree(comm, None if config else f"{args.checkpoint} has no complete checkpoint")
    wrong = f"tokens are bytes: the model must have a vocabulary of {VOCAB}, got {config.vocab}"
    agree(comm, None if config.vocab == VOCAB else wrong)
    device = open_device(comm, args.device)
    if split is None:
        return Parameters(config, device.upload(comm.bcast(state and state.weights)))
    parts = None
    if state:
        weights = Parameters(config, state.weights)
        parts = [weights_of_rank(weights, rank, split) for rank in range(comm.size)]
    flat, shapes = comm.scatter(parts)
    return Parameters(config, device.upload(flat), shapes)


def _state(path: Path) -> State | None:
    """Read a checkpoint, or the latest undamaged one of a folder; print why others are refused."""
    if not path.is_dir():
        return load(path)
    state, refused = latest(path)
    for why in refused.values():
        print(f"refused: {why}", file=sys.stderr, flush=True)
    return state


def _text(tokens: np.ndarray) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")
