"""Bytes that a rank holds at most: its arrays, and the buffers of its schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from a2d_mpi.core.config import OF_KEYS, PHASES
from a2d_mpi.core.masks import Full
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules import METHODS, write, write_all
from a2d_mpi.schedules.accounts import buffers as schedule_buffers
from a2d_mpi.schedules.accounts import results
from a2d_mpi.schedules.steps import KINDS, Schedule

EXACT = 64  # ranks: each has buffers of its own size where the mask hides pairs


def peak_memory(
    method: str, layout: Layout, problem: Problem, rank: int, backward: bool = False
) -> int:
    """Bytes of the caller's arrays, the results and the plan's buffers on a logical rank.

    Small things (blocks of the kernel, intervals: 16 bytes a query and piece) are not counted.

    Parameters
    ----------
    method, layout, problem, rank
        As in `a2d_mpi.planning.cost.traffic`.
    backward : bool
    """
    phases = _phases(method, layout, problem, rank, backward)
    return _peak(phases, layout, problem, rank, backward)


def _peak(
    phases: Sequence[list[Schedule]], layout: Layout, problem: Problem, rank: int, backward: bool
) -> int:
    held = _buffers(phases, layout, problem)
    own, config, last = (problem.counts[rank], problem.counts_kv[rank]), problem.config, phases[-1]
    given = ("q", "k", "v", *("dout", "out", "lse", "delta") * backward)
    held += sum(own[x in OF_KEYS] * config.nbytes(x) for x in given)
    group = config.context_group(layout.heads)
    held += sum(results(schedule, group, config) for schedule in last)
    # New once more: results that lie in buffers or have the dtype of the computation.
    for array in (last[-1].arrays[rows.array] for rows in last[-1].results.values()):
        for name in KINDS[array.kind]:
            wide = name in array.wide and config.narrow
            if name != "lse" and (array.role == "buffer" or wide):
                held += own[name in OF_KEYS] * config.nbytes(name)
    return held


def most_memory(method: str, layout: Layout, problem: Problem, backward: bool = False) -> int:
    """`peak_memory` of the rank that holds the most.

    Of more than `EXACT` ranks an upper bound: as if the mask let all tokens meet.
    """
    if not METHODS[method].at_once:
        phases = PHASES[: 1 + backward]
        ranks = enumerate(zip(*(write_all(method, x, layout, problem) for x in phases)))
        return max(_peak(x, layout, problem, rank, backward) for rank, x in ranks)
    if problem.meetings is not None and layout.size <= EXACT:
        ranks = range(layout.size)
        return max(peak_memory(method, layout, problem, rank, backward) for rank in ranks)
    problem = replace(problem, mask=Full())
    shape = (layout.rows, layout.cols, layout.heads)
    own = np.reshape(problem.counts, shape)
    # It follows from the tokens of a rank, its head group, its row and its column, mostly.
    sizes = [own, *(own.sum(axis=axes, keepdims=True) for axes in (2, (1, 2), (0, 2)))]
    alike = [np.broadcast_to(x, shape).ravel() for x in sizes]
    if METHODS[method].knows_nodes and layout.nodes is not None:
        alike += _by_node(np.reshape(layout.nodes, shape), sizes[1])
    _, ranks = np.unique(alike, axis=1, return_index=True)
    return max(peak_memory(method, layout, problem, rank, backward) for rank in ranks.tolist())


def _by_node(node: np.ndarray, tokens: np.ndarray) -> list[np.ndarray]:
    """Further numbers that tell: ranks and tokens of other nodes that are fetched by a rank.

    `node`: (rows, cols, heads); `tokens`: (rows, cols, 1), of a head group.
    """
    found = []
    for axes in ((2, 0, 1), (2, 1, 0)):
        lines = node.transpose(axes)  # (heads, lines, ranks of a line), and so are the next
        others = np.broadcast_to(tokens, node.shape).transpose(axes)
        near = lines[..., None] == lines[..., None, :]
        members, place = near.sum(-1), np.tril(near, -1).sum(-1)
        fetched = ~near & (place[..., None, :] % members[..., None] == place[..., None])
        nodes = np.broadcast_to((place == 0).sum(-1, keepdims=True), place.shape)
        of_line = members, nodes, fetched.sum(-1), (fetched * others[..., None, :]).sum(-1)
        found += [x.transpose(np.argsort(axes)).ravel() for x in of_line]
    return found


def buffers(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    backward: bool = False,
) -> int:
    """Bytes that a plan keeps between calls (`AttentionPlan.buffer_bytes`); see `peak_memory`.

    Exact, but for parts of one token, which are never out of order.  `backward`: after a backward
    call.
    """
    return _buffers(_phases(method, layout, problem, rank, backward), layout, problem)


def _phases(
    method: str, layout: Layout, problem: Problem, rank: int, backward: bool
) -> list[list[Schedule]]:
    return [write(method, x, layout, problem, rank) for x in PHASES[: 1 + backward]]


def _buffers(phases: Sequence[list[Schedule]], layout: Layout, problem: Problem) -> int:
    group = problem.config.context_group(layout.heads)
    held: dict[object, int] = {}
    for schedule in chain.from_iterable(phases):
        for key, nbytes in schedule_buffers(schedule, group).items():
            held[key] = max(nbytes, held.get(key, 0))
    return sum(held.values())
