"""The program of drivers/generate.py: text from a checkpoint, with a cache on all ranks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.experiments.checkpoint import State, latest, load
from a2d_mpi.experiments.cli import grid_shape, together
from a2d_mpi.experiments.measure import open_device
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.ranks import check_survive, surviving
from a2d_mpi.experiments.user_files import texts_of
from a2d_mpi.gpt.apart import MICRO_BATCHES, attention_grid, open_apart, weights_of_rank
from a2d_mpi.gpt.decode import Decoder
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.serve import Service, sample
from a2d_mpi.gpt.text import VOCAB


def generate(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Generate text; return the exit code: 1 if a request was refused."""
    check_survive(comm, args.survive)
    prompts, split = together(comm, lambda: (_prompts(args), _split(args, comm.size)))
    ranks = split[0] if split else comm.size
    rows, cols = grid_shape(ranks, args.rows, args.cols, args.head_ranks)
    shape = rows, cols, args.head_ranks
    grid = attention_grid(comm, split, shape) if split else ProcessGrid(comm, *shape)
    weights = _weights(comm, args, split)
    rooms = args.room if args.room is not None else [1 << 30] * (rows * cols)
    wrong = f"--room must be a number for each of the {rows * cols} positions, got {rooms}"
    agree(comm, wrong if len(rooms) != rows * cols else None)
    options = {"method": args.method, "transfers": args.transfers, "kernel": args.kernel}
    options["block"] = args.kv_block

    def choose(name: int, length: int, logits: np.ndarray) -> int:
        return sample(logits, args.temperature, (args.seed, name, length))

    service = Service(prompts, dict.fromkeys(prompts, args.tokens), choose)
    decoder: Decoder | None = None
    printer, ended = 0, []  # rank, in the first grid, that prints; requests of the latest step

    def answer(rank: int, first: int) -> int:
        """Answer all prompts; rank 0, `first` in the first grid, prints; return the exit code."""
        nonlocal printer, ended
        service.use(decoder)
        if printer == first:  # otherwise it may have died before it printed the latest answers
            ended = []
        printer = first
        while True:
            for name in ended if rank == 0 else ():
                print(f"{name}: {_shown(prompts[name], service.answers[name])}", flush=True)
            if not service.unanswered:
                refused = any(isinstance(x, ValueError) for x in service.answers.values())
                return FAILED_CHECK if refused else 0
            ended = service.step()

    def work(grid: ProcessGrid, comm: MPI.Intracomm) -> int:
        nonlocal decoder
        numbers = grid.failures.numbers
        positions = np.reshape(numbers, (-1, grid.heads)).tolist()
        least = [min(room_of[x] for x in ranks) for ranks in positions]
        if decoder:
            decoder.free()
        decoder = Decoder(grid, weights, least, **options)
        return answer(comm.rank, numbers[0])

    if split:
        options["micro_batches"] = args.micro_batches or MICRO_BATCHES
        decoder = open_apart(comm, grid, split, weights, rooms, **options)
        code = answer(comm.rank, 0)
        if grid:
            grid.free()
    else:
        room_of = dict(enumerate(np.repeat(rooms, args.head_ranks).tolist()))
        code = surviving("generate.py", grid, work, args.survive, args.method)
    if code is not None:
        decoder.free()
    return code or 0


def _shown(prompt: np.ndarray, answer: np.ndarray | ValueError) -> str:
    """Return a prompt with its answer, or why it was refused."""
    if isinstance(answer, ValueError):
        return f"refused: {answer}"
    return repr("".join(bytes(x.tolist()).decode(errors="replace") for x in (prompt, answer)))


def _prompts(args: argparse.Namespace) -> dict[int, np.ndarray]:
    """Return the bytes of each prompt as tokens."""
    texts = enumerate(texts_of(args))
    return {i: np.frombuffer(x, np.uint8).astype(np.int64) for i, x in texts}


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
    config, device = comm.bcast(state and state.config), open_device(comm, args.device)
    if split is None:
        return Parameters(config, device.upload(comm.bcast(state and state.weights)))
    parts = None
    if state:
        weights = Parameters(config, state.weights)
        parts = [weights_of_rank(weights, rank, split) for rank in range(comm.size)]
    flat, shapes = comm.scatter(parts)
    return Parameters(config, device.upload(flat), shapes)


def _state(path: Path) -> State:
    """Read a checkpoint, or the latest undamaged one of a folder; print why others are refused."""
    state, refused = latest(path) if path.is_dir() else (load(path), {})
    for why in refused.values():
        print(f"refused: {why}", file=sys.stderr, flush=True)
    if state is None:
        raise ValueError(f"{path} has no complete checkpoint")
    if (vocab := state.config.vocab) != VOCAB:
        raise ValueError(
            f"tokens are bytes: the model must have a vocabulary of {VOCAB}, got {vocab}"
        )
    return state
