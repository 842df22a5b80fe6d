"""Bytes that a rank holds at most: its arrays, and the buffers of its schedules."""

from __future__ import annotations

import numpy as np

from a2d_mpi.core.sizes import Layout, Problem
from a2d_mpi.planning.cost import PHASES
from a2d_mpi.schedules import write
from a2d_mpi.schedules.accounts import buffers as schedule_buffers


def peak_memory(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    distribution: str,
    backward: bool = False,
) -> int:
    """Bytes of the caller's arrays, the results and the plan's buffers on a logical rank.

    Small things (blocks of the kernel, intervals: 16 bytes a query and piece) are not counted.

    Parameters
    ----------
    method, layout, problem, rank
        As in `a2d_mpi.planning.cost.traffic`.
    distribution : str
        Unless contiguous, the keys of a column are held twice: as they came, and sorted.
    backward : bool
    """
    held = buffers(method, layout, problem, rank, distribution, backward)
    return held + _arrays(layout, problem, rank, backward)


def most_memory(
    method: str, layout: Layout, problem: Problem, distribution: str, backward: bool = False
) -> int:
    """`peak_memory` of the rank that holds the most."""
    shape = (layout.rows, layout.cols, layout.heads)
    own = np.reshape(problem.counts, shape)
    # It follows from the tokens of a rank, its cell, its row and its column.
    sizes = [own, *(own.sum(axis=axes, keepdims=True) for axes in (2, (1, 2), (0, 2)))]
    alike = [np.broadcast_to(x, shape).ravel() for x in sizes]
    _, ranks = np.unique(alike, axis=1, return_index=True)
    return max(
        peak_memory(method, layout, problem, rank, distribution, backward)
        for rank in ranks.tolist()
    )


def buffers(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    distribution: str,
    backward: bool = False,
) -> int:
    """Bytes that a plan keeps between calls (`AttentionPlan.buffer_bytes`); see `peak_memory`.

    Exact, but for parts of one token, which are never out of order.  `backward`: after a backward
    call.
    """
    group, me = problem.context_group(layout.heads), rank // layout.heads
    total = _exchange(layout, problem, group, rank, backward)
    if layout.positions == 1:
        return total
    held: dict[object, int] = {}
    for phase in PHASES[: 1 + backward]:
        schedule = write(method, phase, layout, group, me)
        for key, nbytes in schedule_buffers(schedule, group, distribution == "contiguous").items():
            held[key] = max(nbytes, held.get(key, 0))
    return total + sum(held.values())


def _arrays(layout: Layout, problem: Problem, rank: int, backward: bool) -> int:
    """The caller's, and what is new in a call: results, and what becomes a result at the end."""
    heads, own = layout.heads, problem.counts[rank]
    p = problem.context_group(heads)
    n, narrow = p.counts[rank // heads], p.itemsize != p.compute_itemsize
    shared, alone = problem.nheads_kv < heads, layout.positions == 1
    total = own * (2 * problem.q + problem.kv + problem.lse)  # q, k, v, out, lse
    if backward:  # dout, delta, dq, dk, dv
        total += own * (2 * problem.q + problem.kv + problem.lse)
        if heads > 1 and alone:
            total += n * (p.dq + p.dkv if shared else p.q + p.kv)
        if shared and narrow:
            total += own * problem.dkv
    elif heads > 1:
        total += n * ((p.q if alone else p.dq) + p.lse)
    elif narrow and not alone:
        total += n * p.dq
    return total


def _exchange(layout: Layout, problem: Problem, p: Problem, rank: int, backward: bool) -> int:
    """To share out the heads, and to bring the results back."""
    heads, own = layout.heads, problem.counts[rank]
    if heads == 1:
        return 0
    n, narrow = p.counts[rank // heads], p.itemsize != p.compute_itemsize
    alone = layout.positions == 1  # results are of the dtype at once, but what will be summed
    there, back, rounded = p.q + p.kv, p.q + p.lse, p.q * (not alone)
    if backward:
        shared = problem.nheads_kv < heads  # then gradients of keys travel as they are summed
        there += p.q + 2 * p.lse
        back = max(back, p.q + (p.dkv if shared else p.kv))  # the same buffers
        rounded += p.q * (shared or not alone) + p.kv * (not shared and not alone)
    # What arrives, all of that in the order of tokens, and what leaves.
    total = (2 * n + (heads - 1) * own) * there + (heads * own + n - own) * back
    return total + n * rounded * narrow
