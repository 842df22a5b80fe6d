"""Bytes that a rank holds at most, listed buffer by buffer."""

from __future__ import annotations

import numpy as np

from a2d_mpi.core.pieces import gradients_by_query
from a2d_mpi.core.sizes import Layout, Problem


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

    Exact, but for parts of one token, which are never out of order, and for rings of uneven
    parts, of which the largest is counted for each.  `backward`: after a backward call.
    """
    p, cell = problem.layer(layout.heads), rank // layout.heads
    total = _exchange(layout, problem, p, rank, backward)
    if layout.cells == 1:
        return total
    if method == "attention2d":
        return total + _grid(layout, p, cell, backward, distribution != "contiguous")
    return total + _rings(layout, p, cell, backward, method == "double ring")


def _arrays(layout: Layout, problem: Problem, rank: int, backward: bool) -> int:
    """The caller's, and what is new in a call: results, and what becomes a result at the end."""
    heads, own = layout.heads, problem.counts[rank]
    p = problem.layer(heads)
    n, narrow = p.counts[rank // heads], p.itemsize != p.compute_itemsize
    shared, alone = problem.nheads_kv < heads, layout.cells == 1
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
    alone = layout.cells == 1  # results are of the dtype at once, but what will be summed
    there, back, rounded = p.q + p.kv, p.q + p.lse, p.q * (not alone)
    if backward:
        shared = problem.nheads_kv < heads  # then gradients of keys travel as they are summed
        there += p.q + 2 * p.lse
        back = max(back, p.q + (p.dkv if shared else p.kv))  # the same buffers
        rounded += p.q * (shared or not alone) + p.kv * (not shared and not alone)
    # What arrives, all of that in the order of tokens, and what leaves.
    total = (2 * n + (heads - 1) * own) * there + (heads * own + n - own) * back
    return total + n * rounded * narrow


def _grid(layout: Layout, p: Problem, cell: int, backward: bool, unsorted: bool) -> int:
    rows, cols = layout.rows, layout.cols
    row, col = divmod(cell, cols)
    n = p.counts[cell]
    nq = sum(p.counts[row * cols + c] for c in range(cols))
    nk = sum(p.counts[r * cols + col] for r in range(rows))
    several_q, several_k = cols > 1, rows > 1
    # Gathered; partial outs to send and received; my own in the compute dtype; lse's rest.
    total = n * p.lse + nq * p.q * several_q + nk * p.kv * several_k
    total += (nq - n) * (p.q + p.lse) + (cols - 1) * n * (p.q + p.lse)
    total += n * (p.dq + p.lse) * several_k
    if unsorted and several_k and several_q:
        total += nk * p.kv
    if backward:
        total += nq * (p.q + 2 * p.lse) * several_q + nq * p.dq + nk * p.dkv
        total += (cols - 1) * n * p.dq + (rows - 1) * n * p.dkv
        if unsorted and several_k and gradients_by_query(rows, cols, p.nheads, p.nheads_kv):
            total += nk * p.dkv
    return total


def _rings(layout: Layout, p: Problem, cell: int, backward: bool, double: bool) -> int:
    n, block = p.counts[cell], max(p.counts)
    # A double ring whose inner ones are single ranks is one ring.
    places = layout.cols if double and layout.cols > 1 else layout.cells
    groups = layout.cells // places
    total = n * (p.dq + 2 * p.lse)  # the partial result of a step, lse's rest
    total += (min(2, places - 1) + min(2, groups - 1)) * block * p.kv
    if backward:
        # Gradients of two blocks as I add to them and as they arrive, of groups on their way.
        total += n * p.dq + (4 + 2 * (groups > 1)) * block * p.dkv
    return total
