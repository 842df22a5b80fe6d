"""Work and traffic of partitions under many masks, read off their schedules: nothing is run."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.distribution import FORMULAS
from a2d_mpi.core.pairs import visible_pairs
from a2d_mpi.core.patterns import make_mask, split_masks
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning import cost
from a2d_mpi.schedules import METHODS, problem_of, write
from a2d_mpi.schedules.places import Places
from a2d_mpi.schedules.steps import Attend


class Figures(NamedTuple):
    """One way to compute a mask.

    Attributes
    ----------
    plan : str
        Method, grid and distribution.
    uneven : float
        Visible pairs of the largest rank over their mean.
    moved : float
        Bytes that the largest rank sends, or receives, in a forward pass, over those of all of q.
    """

    plan: str
    uneven: float
    moved: float


def figures(method: str, layout: Layout, problem: Problem) -> Figures:
    """Count the visible pairs and the bytes of every rank."""
    at_once, most = METHODS[method].at_once, np.zeros((2, layout.size))
    for rank in [None] if at_once else range(layout.size):
        for move in cost.moves(method, layout, problem, rank, ("forward",)):
            most[int(move.sent), move.rank] += move.tokens * sum(move.tensors)
    areas = _tiles(method, layout, problem) if at_once else _calls(method, layout, problem)
    whole = problem.config.seqlen * problem.config.nbytes("q")
    plan = f"{method}:{layout.rows}x{layout.cols} {problem.shards.name}"
    return Figures(plan, float(areas.max() / max(areas.mean(), 1)), float(most.max() / whole))


def _tiles(method: str, layout: Layout, problem: Problem) -> np.ndarray:
    """Visible pairs of every rank, if it computes a tile."""
    rows, cols = METHODS[method].tiles(layout)
    pairs, _ = visible_pairs(problem.mask, problem.shards, problem.shards_kv)
    of_rows = pairs.reshape(rows, cols, -1).sum(axis=1)  # (rows, shards of keys)
    return of_rows.reshape(rows, rows, cols).sum(axis=1)


def _calls(method: str, layout: Layout, problem: Problem) -> np.ndarray:
    """Visible pairs of every rank, kernel call by kernel call."""
    found = np.zeros(layout.size, np.int64)
    for rank in range(layout.size):
        for schedule in write(method, "forward", layout, problem, rank):
            places, mask = Places(schedule), schedule.mask or problem.mask
            for step in schedule.steps:
                if isinstance(step, Attend):
                    keys = np.sort(places.tokens(step.keys))
                    found[rank] += mask.area(places.tokens(step.queries), keys)
    return found


def compared(text: str, seqlen: int, ranks: int) -> list[Figures]:
    """The best grid of each distribution by its bytes, the ring, and the blocks."""
    mask, found = make_mask(text, seqlen), []
    config = AttentionConfig(seqlen, 16, 128, dtype="bfloat16")
    shapes = [Layout(r, ranks // r) for r in range(1, ranks + 1) if ranks % r == 0]
    names = [x for x in FORMULAS if x not in ("triangle", "striped")]
    for name in (*names, "balanced"):
        grids = [
            figures("attention2d", x, problem_of("attention2d", x, config, mask, name))
            for x in shapes
        ]
        found.append(min(grids, key=lambda x: (x.moved, x.uneven)))
    for method in ("ring", "blocks"):
        problem = problem_of(method, shapes[-1], config, mask)
        found.append(figures(method, shapes[-1], problem))
    return found


def print_table(args: argparse.Namespace) -> int:
    """Print the table of all masks that are asked for; returns the exit code."""
    texts = split_masks(args.masks)
    heads: list[str] = []
    for text in texts:
        rows = compared(text, args.seqlen, args.ranks)
        if not heads:
            heads = [
                "mask",
                "grid, contiguous",
                "grid, zigzag",
                "grid, balanced",
                "ring",
                "blocks",
            ]
            print(f"{args.ranks} ranks, {args.seqlen} tokens, forward: bytes of the largest rank,")
            print("over those of q; in parentheses its visible pairs over the mean, and the grid")
            print(" | ".join(heads), flush=True)
        cells = [
            f"{x.moved:.4f} ({x.uneven:.3f}, {x.plan.split()[0].split(':')[1]})" for x in rows
        ]
        print(" | ".join([text, *cells]), flush=True)
    return 0
