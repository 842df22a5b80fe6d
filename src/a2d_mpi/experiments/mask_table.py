"""Work and traffic of partitions under many masks, read off their schedules: nothing is run."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.pairs import visible_pairs
from a2d_mpi.core.patterns import make_mask, split_masks
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.options import method_name
from a2d_mpi.planning import cost
from a2d_mpi.schedules import METHODS, problem_of, write
from a2d_mpi.schedules.places import Places
from a2d_mpi.schedules.steps import Attend


class Figures(NamedTuple):
    """One way to compute a mask on a grid.

    Attributes
    ----------
    grid : str
    uneven : float
        Visible pairs of the largest rank over their mean.
    moved : float
        Bytes that the largest rank sends, or receives, in a forward pass, over those of all of q.
    """

    grid: str
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
    grid = f"{layout.rows}x{layout.cols}"
    return Figures(grid, float(areas.max() / max(areas.mean(), 1)), float(most.max() / whole))


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


def best_of(method: str, distribution: str | None, text: str, seqlen: int, ranks: int) -> Figures:
    """The grid whose largest rank moves the fewest bytes, of all shapes that suit a method."""
    mask, found = make_mask(text, seqlen), []
    config = AttentionConfig(seqlen, 16, 128, dtype="bfloat16")
    for rows in (x for x in range(1, ranks + 1) if ranks % x == 0):
        layout = Layout(rows, ranks // rows)
        if METHODS[method].suits(layout):
            problem = problem_of(method, layout, config, mask, distribution)
            found.append(figures(method, layout, problem))
    return min(found, key=lambda x: (x.moved, x.uneven))


def print_table(args: argparse.Namespace) -> int:
    """Print the table of all masks that are asked for; returns the exit code."""
    texts = split_masks(args.masks)
    plans = [
        (method_name(m), name or None) for m, _, name in (x.partition("/") for x in args.plans)
    ]
    print(f"{args.ranks} ranks, {args.seqlen} tokens, forward: bytes of the largest rank,")
    print("over those of q; in parentheses its visible pairs over the mean, and the grid")
    print(" | ".join(["mask", *(f"{m}/{name}" if name else m for m, name in plans)]), flush=True)
    for text in texts:
        rows = [best_of(*plan, text, args.seqlen, args.ranks) for plan in plans]
        cells = [f"{x.moved:.4f} ({x.uneven:.3f}, {x.grid})" for x in rows]
        print(" | ".join([text, *cells]), flush=True)
    return 0
