"""Panels of a picture of schedules: computing, messages and times of every rank; no MPI import.

Everything is read off the schedules.  This module names no method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.mask import Mask
from a2d_mpi.planning import cost
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules import problem_of, write
from a2d_mpi.schedules.steps import KernelCall

TOKENS = 72  # drawn, about: with more of them the slices of a rank are not seen
Timelines = list[list[tuple[str, float, float]]]


@dataclass(frozen=True)
class Panels:
    """One row of the picture.  Ranks are world ranks: neighbours share nodes.

    Attributes
    ----------
    title : str
    computes : (U, n, n) int
        The rank that computes each pair of a query and a key, for each slice of the heads; -1: the
        pair is hidden.
    received : dict of str to (P, P) float64
        Bytes that a rank (row) receives from a rank (column), by phase.
    spans : dict of str to list of list of (str, float, float)
        Part, begin and end in seconds of all that a rank does, by phase and rank.
    """

    title: str
    computes: np.ndarray
    received: dict[str, np.ndarray]
    spans: dict[str, Timelines]


def panels(
    machine: Machine,
    method: str,
    layout: Layout,
    work: Workload,
    mask_of: Callable[[int], Mask] | None = None,
) -> Panels:
    """Read everything that is drawn of one plan off its schedules.

    `mask_of` makes the mask of the few tokens whose pairs are drawn.  Default: the workload's.
    """
    world = layout.world_ranks()
    of_world = np.argsort(world)  # the grid rank of each world rank
    problem = problem_of(method, layout, work, work.mask)
    received: dict[str, np.ndarray] = {}
    spans: dict[str, Timelines] = {}
    predict(machine, method, layout, work, spans=spans)
    for phase in work.phases:
        received[phase] = np.zeros((layout.size, layout.size))
        for move in cost.moves(method, layout, problem, None, (phase,)):
            if not move.sent:
                received[phase][world[move.rank], world[move.peer]] += move.nbytes
        spans[phase] = [[x[:3] for x in spans[phase][rank]] for rank in of_world]
    shape = f"{layout.rows} x {layout.cols}" + f" x {layout.heads}" * (layout.heads > 1)
    order = f" @{layout.numbering}" * (layout.numbering != "rcu")
    # All shards get the same number of tokens, and few of them if many ranks share a pair.
    pieces = 2 * layout.positions
    drawn = min(work.seqlen, pieces * max(2, TOKENS // (pieces * layout.heads)))
    try:
        mask = mask_of(drawn) if mask_of else work.mask
        mask.check(drawn)
    except ValueError:  # the mask has a fixed length, and its first tokens are drawn
        mask = IntervalMask(*work.mask.checked(np.arange(drawn), drawn))
    computes = who_computes(
        method, layout, replace(work, seqlen=drawn, seqlen_kv=drawn, mask=mask)
    )
    computes = np.where(computes < 0, -1, world[computes])
    name = f"{method} {shape}{order}, {problem.queries.name}"
    if layout.slices not in (None, (1, 1)):
        name += f", {'x'.join(map(str, layout.slices[: len(work.phases)]))} slices"
    return Panels(name, computes, received, spans)


def blocks(
    method: str, phase: str, layout: Layout, work: Workload, distribution: str | None = None
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the grid rank and the tokens of queries and keys of every kernel call."""
    problem = problem_of(method, layout, work, work.mask, distribution)
    for rank in range(layout.size):
        for program in write(method, phase, layout, problem, rank, work.overlap):
            for step in program.steps:
                if isinstance(step, KernelCall):
                    tokens = (program.tokens(x) for x in (step.queries, step.keys))
                    yield rank, *tokens


def who_computes(
    method: str, layout: Layout, work: Workload, distribution: str | None = None
) -> np.ndarray:
    """Find the grid rank that computes each pair, (U, seqlen, seqlen); -1: the pair is hidden.

    The U ranks of a Ulysses group compute the same pairs, each for its slice of the heads.
    """
    n = work.seqlen
    computes = np.full((layout.heads, n, n), -1)
    for rank, queries, keys in blocks(method, work.phases[0], layout, work, distribution):
        tile = computes[rank % layout.heads][np.ix_(queries, keys)]
        tile[work.mask.dense(queries, keys)] = rank
        computes[rank % layout.heads][np.ix_(queries, keys)] = tile
    return computes
