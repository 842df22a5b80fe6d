"""What a method sends, receives and computes, in closed form.

Counted traffic is held equal to these formulas on every rank.  With equal parts of n = N / P
tokens a rank of an R x C grid receives, in elements,

    forward   Q (C-1) n H D  +  K, V 2 (R-1) n Hkv D  +  out, lse (C-1) n H (D+1)
    backward  Q, dout 2 (C-1) n H D  +  lse, delta 2 (C-1) n H  +  K, V 2 (R-1) n Hkv D
              +  dQ (C-1) n H D  +  dK, dV 2 (R-1) n Hkv D

and a rank of a ring ``2 (P-1) n Hkv D`` forward, ``2 (2P-1) n Hkv D`` backward.  The functions
below are exact for uneven parts too.  This module does not import MPI.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Bytes = dict[tuple[str, str], list[int]]
# Phase, communicator, bytes of one token of each tensor, tokens sent, tokens received, from whom.
Move = tuple[str, str, tuple[int, ...], int, int, int]


@dataclass(frozen=True)
class Problem:
    """Sizes that traffic depends on.

    Parameters
    ----------
    counts : tuple of int
        Tokens of every rank.
    nheads, nheads_kv, headdim : int
    itemsize : int
        Bytes of an element of q, k, v, out and dout.
    compute_itemsize : int
        Bytes of an element of lse, delta and the partial gradients dq, dk, dv.
    """

    counts: tuple[int, ...]
    nheads: int
    nheads_kv: int
    headdim: int
    itemsize: int
    compute_itemsize: int

    @property
    def q(self) -> int:
        """Bytes of one token of q, out or dout."""
        return self.nheads * self.headdim * self.itemsize

    @property
    def kv(self) -> int:
        """Bytes of one token of k and v together."""
        return 2 * self.nheads_kv * self.headdim * self.itemsize

    @property
    def dq(self) -> int:
        """Bytes of one token of a partial dq."""
        return self.nheads * self.headdim * self.compute_itemsize

    @property
    def dkv(self) -> int:
        """Bytes of one token of a partial dk and dv together."""
        return 2 * self.nheads_kv * self.headdim * self.compute_itemsize

    @property
    def lse(self) -> int:
        """Bytes of one token of lse or delta."""
        return self.nheads * self.compute_itemsize


def traffic_2d(problem: Problem, rows: int, cols: int, rank: int) -> Bytes:
    """Bytes [sent, received] by `rank` of a rows x cols grid, by (phase, communicator).

    Pairs between which nothing moves are left out.
    """
    p, n = problem, problem.counts
    row, col = divmod(rank, cols)
    # Tokens of the other ranks of my row and of my column, and what I own.
    others_q = sum(n[row * cols + c] for c in range(cols)) - n[rank]
    others_k = sum(n[r * cols + col] for r in range(rows)) - n[rank]
    gather_q, gather_k = (cols - 1) * n[rank], (rows - 1) * n[rank]
    return _moved(
        # What I send to be gathered is my own, what I return as partial results is the others'.
        (("forward", "row"), gather_q * p.q + others_q * (p.q + p.lse)),
        (("forward", "col"), gather_k * p.kv),
        (("backward", "row"), gather_q * (2 * p.q + 2 * p.lse) + others_q * p.dq),
        (("backward", "col"), gather_k * p.kv + others_k * p.dkv),
        # And the other way round.
        received=(
            others_q * p.q + gather_q * (p.q + p.lse),
            others_k * p.kv,
            others_q * (2 * p.q + 2 * p.lse) + gather_q * p.dq,
            others_k * p.kv + gather_k * p.dkv,
        ),
    )


def traffic_ring(problem: Problem, rank: int) -> Bytes:
    """Bytes [sent, received] by `rank` of the ring, by (phase, communicator).

    K and V pass every rank once in each pass; dK and dV travel with them in the backward pass,
    one step further, home to their owner.
    """
    n, size = problem.counts, len(problem.counts)
    if size == 1:
        return {}
    total = sum(n)
    # I never receive my own k and v, and never send those of the rank after me.
    sent, received = total - n[(rank + 1) % size], total - n[rank]
    # Gradients: I send on those of all ranks, and receive those of all ranks, my own at the end.
    return _moved(
        (("forward", "ring"), sent * problem.kv),
        (("backward", "ring"), sent * problem.kv + total * problem.dkv),
        received=(received * problem.kv, received * problem.kv + total * problem.dkv),
    )


def traffic_double_ring(problem: Problem, outer: int, inner: int, rank: int) -> Bytes:
    """Bytes [sent, received] by `rank` of `outer` rings of `inner` ranks.

    K and V go round the inner ring; the block that a rank began with goes to the same place in
    the next inner ring.  dK and dV follow their block, one step behind, and go home.  (Gu et al.,
    "LoongTrain", arXiv:2406.18485, section 4.3.)
    """
    return _bytes(_double_ring(problem, outer, inner, rank))


def flops(area: int, nheads: int, headdim: int, backward: bool = False) -> int:
    """Floating point operations of attention over `area` visible pairs.

    Two products of 2 headdim operations a pair and head forward, five backward; exponentials are
    not counted.
    """
    return (10 if backward else 4) * area * nheads * headdim


def _double_ring(p: Problem, outer: int, inner: int, rank: int) -> Iterator[Move]:
    r, c = divmod(rank, inner)
    k, dk = (p.kv // 2,) * 2, (p.dkv // 2,) * 2

    def at(group: int, place: int) -> int:
        return group % outer * inner + place % inner

    for s in range(outer):
        for t in range(inner if inner > 1 else 0):
            blocks = p.counts[at(r - s, c - t)], p.counts[at(r - s, c - t - 1)], at(r, c - 1)
            if t < inner - 1:
                yield "forward", "inner", k, *blocks
                yield "backward", "inner", k, *blocks
            yield "backward", "inner", dk, *blocks
        blocks = p.counts[at(r - s, c)], p.counts[at(r - s - 1, c)], at(r - 1, c)
        if s < outer - 1:
            yield "forward", "outer", k, *blocks
            yield "backward", "outer", k, *blocks
        if outer > 1:
            yield "backward", "outer", dk, *blocks


def _bytes(moved: Iterator[Move]) -> Bytes:
    found: Bytes = {}
    for phase, channel, tensors, *tokens, _ in moved:
        both = found.setdefault((phase, channel), [0, 0])
        for direction, n in enumerate(tokens):
            both[direction] += n * sum(tensors)
    return {key: both for key, both in found.items() if any(both)}


def _moved(*sent: tuple[tuple[str, str], int], received: Iterable[int]) -> Bytes:
    return {
        key: [nbytes, other]
        for (key, nbytes), other in zip(sent, received, strict=True)
        if nbytes or other
    }
