"""Bytes that a rank holds at most, listed buffer by buffer; this module does not import MPI."""

from __future__ import annotations

from a2d_mpi.cost import Layout, Problem


def peak_memory(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    distribution: str,
    backward: bool = False,
) -> int:
    """Bytes of the caller's arrays, the results and the plan's buffers on a logical rank.

    Plans keep their buffers, so those of the forward pass count in the backward pass too.  Small
    things (blocks of the kernel, intervals: 16 bytes a query and piece) are not counted.

    Parameters
    ----------
    method, layout, problem, rank
        As in `a2d_mpi.cost.traffic`.
    distribution : str
        Unless contiguous, the keys of a column are held twice: as they came, and sorted.
    backward : bool
    """
    heads, own = layout.heads, problem.counts[rank]
    p, cell = problem.layer(heads), rank // heads
    # The caller's q, k, v and out, lse; dout, delta and dq, dk, dv, as summed and as returned.
    total = own * (2 * problem.q + problem.kv + problem.lse)
    if backward:
        total += own * (problem.q + problem.lse + problem.dq + problem.dkv)
        if problem.itemsize != problem.compute_itemsize:
            total += own * (problem.q + problem.kv)
    if heads > 1:
        # What a layer works on and returns, and what is packed for the other layers.
        for tokens, sizes in ((p.counts[cell], p), (own, problem)):
            total += tokens * (2 * sizes.q + sizes.kv + sizes.lse)
            if backward:
                total += tokens * (sizes.q + sizes.lse + sizes.dq + sizes.dkv)
    sizes = (layout, p, cell, backward)
    if method == "attention2d":
        return total + _grid(*sizes, distribution != "contiguous")
    return total + _rings(*sizes, method == "double ring")


def _grid(layout: Layout, p: Problem, cell: int, backward: bool, unsorted: bool) -> int:
    rows, cols = layout.rows, layout.cols
    row, col = divmod(cell, cols)
    n = p.counts[cell]
    nq = sum(p.counts[row * cols + c] for c in range(cols))
    nk = sum(p.counts[r * cols + col] for r in range(rows))
    several_q, several_k = cols > 1, rows > 1
    # Gathered; partial outs to send and received; my own in the compute dtype; lse's rest.
    total = n * p.lse * (several_q or several_k)
    total += nq * p.q * several_q + nk * p.kv * several_k
    total += (nq - n) * (p.q + p.lse) + (cols - 1) * n * (p.q + p.lse)
    total += n * (p.dq + p.lse) * several_k
    if unsorted and several_k and several_q:
        total += nk * p.kv
    if backward:
        total += nq * (p.q + 2 * p.lse) * several_q + nq * p.dq + nk * p.dkv
        total += (cols - 1) * n * p.dq + (rows - 1) * n * p.dkv
        if unsorted and several_k and (cols - 1) * p.nheads >= 2 * (rows - 1) * p.nheads_kv:
            total += nk * p.dkv
    return total


def _rings(layout: Layout, p: Problem, cell: int, backward: bool, double: bool) -> int:
    n, block = p.counts[cell], max(p.counts)
    total = n * (p.dq + 2 * p.lse)  # the partial result of a step, lse's rest
    steps = layout.cells
    inner = layout.cols if double else steps
    blocks = min(2, inner - 1) + (min(2, layout.rows - 1) if double else 0)
    total += blocks * block * p.kv
    if backward:
        buffers = min(2, steps) + 2 * (steps > 1)
        if double and layout.rows > 1 and inner > 1:
            buffers += 2  # the sums over groups, on their way between these
        total += buffers * block * p.dkv
    return total
