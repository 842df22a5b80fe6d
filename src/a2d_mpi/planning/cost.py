"""What a method sends, receives and computes, exactly.

Counted traffic is held equal to these formulas on every rank.  With equal parts of n = N / P
tokens a rank of an R x C grid receives, in elements,

    forward   Q (C-1) n H D  +  K, V 2 (R-1) n Hkv D  +  out, lse (C-1) n H (D+1)
    backward  Q, dout 2 (C-1) n H D  +  lse, delta 2 (C-1) n H  +  K, V 2 (R-1) n Hkv D
              +  dQ (C-1) n H D  +  dK, dV 2 (R-1) n Hkv D

and a rank of a ring ``2 (P-1) n Hkv D`` forward, ``2 (2P-1) n Hkv D`` backward.  With a head axis
of U ranks (`a2d_mpi.core.sizes.Layout`) these hold inside each layer, for the tokens of whole
cells and 1/U of the heads, and the exchange of heads comes on top.  Every function is exact for
uneven parts too: it lists the messages of the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

from a2d_mpi.core.pieces import cut
from a2d_mpi.core.sizes import MAX_MESSAGE, Layout, Problem

Bytes = dict[tuple[str, str], list[int]]
Ints = int | np.ndarray  # of one rank, or of several
# Phase, communicator, bytes of a token in each message, tokens sent, tokens received, from whom.
Move = tuple[str, str, tuple[int, ...], Ints, Ints, Ints]

METHODS = ("attention2d", "ring", "striped ring", "double ring")


def traffic(method: str, layout: Layout, problem: Problem, rank: int) -> Bytes:
    """Bytes [sent, received] by a logical rank, by (phase, communicator).

    Parameters
    ----------
    method : str
        One of `METHODS`.
    layout : Layout
    problem : Problem
        With the counts of all ranks of the layout and all heads.
    rank : int
        Logical.
    """
    return _bytes(moves(method, layout, problem, rank))


def messages(method: str, layout: Layout, problem: Problem, rank: int) -> Bytes:
    """The number of messages; otherwise like `traffic`."""
    found: Bytes = {}
    for phase, channel, tensors, *tokens, _ in moves(method, layout, problem, rank):
        for direction, n in enumerate(tokens):
            number = sum(-(-n * size // MAX_MESSAGE) for size in tensors)
            found.setdefault((phase, channel), [0, 0])[direction] += number
    return {key: both for key, both in found.items() if any(both)}


def traffic_2d(problem: Problem, rows: int, cols: int, rank: int) -> Bytes:
    """Bytes [sent, received] by `rank` of a rows x cols grid, by (phase, communicator).

    Pairs between which nothing moves are left out.
    """
    return _bytes(_grid(problem, rows, cols, rank))


def traffic_ring(problem: Problem, rank: int) -> Bytes:
    """Bytes [sent, received] by `rank` of the ring, by (phase, communicator).

    K and V pass every rank once in each pass; dK and dV travel with them in the backward pass,
    one step further, home to their owner.
    """
    return _bytes(_ring(problem, rank))


def traffic_double_ring(problem: Problem, outer: int, inner: int, rank: int) -> Bytes:
    """Bytes [sent, received] by `rank` of `outer` rings of `inner` ranks.

    K and V go round the inner ring; the block that a rank began with goes to the same place in
    the next inner ring.  dK and dV follow their block, one step behind, and go home.  (Gu et al.,
    "LoongTrain", arXiv:2406.18485, section 4.3.)
    """
    return _bytes(_double_ring(problem, outer, inner, rank))


def traffic_heads(problem: Problem, heads: int, rank: int) -> Bytes:
    """Bytes [sent, received] by `rank` to share out the heads in its cell, and to come back.

    Parameters
    ----------
    problem : Problem
        The whole one, not that of a layer.
    heads : int
        U, ranks of a cell: `rank` is in cell ``rank // U``.
    """
    return _bytes(_heads(problem, heads, rank))


def moves(method: str, layout: Layout, problem: Problem, rank: Ints) -> Iterator[Move]:
    """All that a logical rank exchanges, messages of the same tokens together.

    `rank`: one, or an array of them; then tokens and sources are arrays, too.
    """
    if len(problem.counts) != layout.size:
        raise ValueError(f"{len(problem.counts)} parts for {layout.size} ranks")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; one of {METHODS}")
    layer, cell, u = problem.layer(layout.heads), rank // layout.heads, rank % layout.heads
    yield from _heads(problem, layout.heads, rank)
    if method == "attention2d":
        inside = _grid(layer, layout.rows, layout.cols, cell)
    elif method == "double ring":
        inside = _double_ring(layer, layout.rows, layout.cols, cell)
    else:
        inside = _ring(layer, cell)
    for *move, source in inside:
        yield *move, source * layout.heads + u


def lower_bound(problem: Problem, area: float, tokens: float, backward: bool = False) -> float:
    """Bytes that a rank must receive or return, if it computes `area` pairs for all heads.

    A rank that meets nq queries with nk keys reads q and returns out, ``2 nq H D`` elements, and
    reads k and v, ``2 nk Hkv D``; with ``nq nk >= area`` this is at least
    ``4 D sqrt(H Hkv area)``, less what it owns (q, k, v, out of its `tokens`).  Backward it
    touches q, dout, dq and k, v, dk, dv: ``4 sqrt(3) D sqrt(H Hkv area)``.  Elements count
    `itemsize` bytes; lse and delta are not counted.
    """
    p = problem
    per_q, per_k = (3 * p.q, 2 * p.kv) if backward else (2 * p.q, p.kv)
    return max(0.0, 2 * math.sqrt(per_q * per_k * area) - tokens * (per_q + per_k))


def _grid(p: Problem, rows: int, cols: int, rank: Ints) -> Iterator[Move]:
    row, col = rank // cols, rank % cols
    k, dk = (p.kv // 2,) * 2, (p.dkv // 2,) * 2
    units = _units(p, cols, rank)
    for peer in (row * cols + (col + i) % cols for i in range(1, cols)):
        for mine, theirs in ((n[rank], n[peer]) for n in units):
            # What I send to be gathered is my own, what I return as partial results is theirs.
            yield "forward", "row", (p.q,), mine, theirs, peer
            yield "forward", "row", (p.q, p.lse), theirs, mine, peer
            yield "backward", "row", (p.q, p.q, p.lse, p.lse), mine, theirs, peer
            yield "backward", "row", (p.dq,), theirs, mine, peer
    units = _units(p, rows, rank)
    for peer in ((row + i) % rows * cols + col for i in range(1, rows)):
        for mine, theirs in ((n[rank], n[peer]) for n in units):
            yield "forward", "col", k, mine, theirs, peer
            yield "backward", "col", k, mine, theirs, peer
            yield "backward", "col", dk, theirs, mine, peer


def _units(p: Problem, ranks: int, rank: Ints) -> list[Sequence[int] | np.ndarray]:
    """Tokens of the first units of all chunks, and of the second ones if there are any."""
    chunks = ([s.stop - s.start for s in cut(n, ranks)] for n in p.counts)
    return [_by(rank, n) for n in zip_longest(*chunks, fillvalue=0)]


def _by(rank: Ints, n: Sequence[int]) -> Sequence[int] | np.ndarray:
    """Sizes that `rank` can be an index of."""
    return np.array(n) if np.ndim(rank) else n


def _ring(p: Problem, rank: Ints) -> Iterator[Move]:
    n, size = _by(rank, p.counts), len(p.counts)
    k, dk = (p.kv // 2,) * 2, (p.dkv // 2,) * 2
    mine, source = n[rank], (rank - 1) % size
    for step in range(size if size > 1 else 0):
        blocks = mine, n[(rank - step - 1) % size], source
        mine = blocks[1]
        if step < size - 1:
            yield "forward", "ring", k, *blocks
            yield "backward", "ring", k, *blocks
        yield "backward", "ring", dk, *blocks


def _double_ring(p: Problem, outer: int, inner: int, rank: Ints) -> Iterator[Move]:
    n, r, c = _by(rank, p.counts), rank // inner, rank % inner
    k, dk = (p.kv // 2,) * 2, (p.dkv // 2,) * 2

    def at(group: Ints, place: Ints) -> Ints:
        return group % outer * inner + place % inner

    inside, outside = at(r, c - 1), at(r - 1, c)
    for s in range(outer):
        mine = n[at(r - s, c)]
        for t in range(inner if inner > 1 else 0):
            blocks = mine, n[at(r - s, c - t - 1)], inside
            mine = blocks[1]
            if t < inner - 1:
                yield "forward", "inner", k, *blocks
                yield "backward", "inner", k, *blocks
            yield "backward", "inner", dk, *blocks
        blocks = n[at(r - s, c)], n[at(r - s - 1, c)], outside
        if s < outer - 1:
            yield "forward", "outer", k, *blocks
            yield "backward", "outer", k, *blocks
        if outer > 1:
            yield "backward", "outer", dk, *blocks


def _heads(p: Problem, heads: int, rank: Ints) -> Iterator[Move]:
    if heads == 1:
        return
    layer, n = p.layer(heads), _by(rank, p.counts)
    q, k, lse = layer.q, layer.kv // 2, layer.lse
    # Several layers share a key head: its gradients are summed by the owner, in the compute dtype.
    dk = layer.dkv // 2 if p.nheads_kv < heads else k
    for peer in (rank - rank % heads + (rank + i) % heads for i in range(1, heads)):
        mine, theirs = n[rank], n[peer]
        # All tensors in one message.
        yield "forward", "head", (q + 2 * k,), mine, theirs, peer
        yield "forward", "head", (q + lse,), theirs, mine, peer
        yield "backward", "head", (2 * q + 2 * lse + 2 * k,), mine, theirs, peer
        yield "backward", "head", (q + 2 * dk,), theirs, mine, peer


def _bytes(moved: Iterator[Move]) -> Bytes:
    found: Bytes = {}
    for phase, channel, tensors, *tokens, _ in moved:
        both = found.setdefault((phase, channel), [0, 0])
        for direction, n in enumerate(tokens):
            both[direction] += n * sum(tensors)
    return {key: both for key, both in found.items() if any(both)}
