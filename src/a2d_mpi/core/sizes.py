"""Sizes of a problem and of a grid of ranks, and the bounds of these sizes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

# MPI counts are ints and some transports fail beyond 2 GiB: larger tensors go in several messages.
MAX_MESSAGE = 1 << 30  # bytes
# Beyond these the pairs of a sequence, and the bytes of a tensor, are no 64-bit integers.
LARGEST = {"seqlen": 1 << 31, "nheads": 1 << 16, "nheads_kv": 1 << 16, "headdim": 1 << 16}


@dataclass(frozen=True)
class Problem:
    """Sizes that traffic depends on.

    Parameters
    ----------
    counts : tuple of int
        Tokens of every rank's shard, before any exchange of heads, by logical rank.  The U ranks
        of a head group follow each other.
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

    def context_group(self, heads: int) -> Problem:
        """The problem of one context group: all tokens of its head groups, 1/`heads` of the heads.

        Raises
        ------
        ValueError
            If the heads cannot be divided among `heads` ranks.
        """
        why = misfit(self.nheads, self.nheads_kv, heads)
        if why:
            raise ValueError(why)
        counts = tuple(np.reshape(self.counts, (-1, heads)).sum(axis=1).tolist())
        kv = max(1, self.nheads_kv // heads)
        return Problem(
            counts, self.nheads // heads, kv, self.headdim, self.itemsize, self.compute_itemsize
        )


@dataclass(frozen=True)
class Layout:
    """Ranks as rows x cols head groups of `heads` ranks each, and their places in the machine.

    Parameters
    ----------
    rows, cols, heads : int
        R, C and U.  The logical rank of (r, c, u) is ``(r C + c) U + u``; the U ranks of a head
        group share the heads.  Rings take the positions (r, c) one after the other; a double ring
        has R outer steps over inner rings of C positions.
    order : str
        A permutation of "rcu": the axes from the slowest to the fastest varying physical rank.
        Nodes hold consecutive physical ranks.
    """

    rows: int
    cols: int
    heads: int = 1
    order: str = "rcu"

    def __post_init__(self) -> None:
        if min(self.rows, self.cols, self.heads) < 1:
            raise ValueError(f"no grid has {self.rows} x {self.cols} x {self.heads} ranks")
        if sorted(self.order) != ["c", "r", "u"]:
            raise ValueError(f"order must be a permutation of 'rcu', got {self.order!r}")

    @property
    def positions(self) -> int:
        """R C, the positions of the grid: ranks of a context group."""
        return self.rows * self.cols

    @property
    def size(self) -> int:
        """P = R C U."""
        return self.positions * self.heads

    def physical(self) -> np.ndarray:
        """Physical rank of every logical rank, (P,) int64."""
        sizes = {"r": self.rows, "c": self.cols, "u": self.heads}
        ranks = np.arange(self.size).reshape([sizes[axis] for axis in self.order])
        return ranks.transpose([self.order.index(axis) for axis in "rcu"]).ravel()


def check_sizes(**sizes: object) -> None:
    """Raise ValueError for a size of a problem, named as in `LARGEST`, that is out of bounds."""
    for name, value in sizes.items():
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if value > LARGEST[name]:
            digits = int(value).bit_length() * math.log10(2)
            shown = value if digits < 30 else f"one of {digits:.0f} digits"
            raise ValueError(f"{name} must be at most {LARGEST[name]}, got {shown}")
    if sizes["nheads"] % sizes["nheads_kv"]:
        raise ValueError(
            f"nheads_kv must divide nheads, got {sizes['nheads_kv']} and {sizes['nheads']}"
        )


def check_room(
    seqlen: int, nheads: int, nheads_kv: int, headdim: int, itemsize: int, ranks: int
) -> None:
    """Refuse a problem that cannot fit, before any code walks over all tokens.

    Raises
    ------
    ValueError
        If q, k and v of a rank, at most a third of its need, fill the memory of its node.
    """
    nbytes = -(-seqlen // ranks) * (nheads + 2 * nheads_kv) * headdim * itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        raise ValueError(
            f"{seqlen} tokens on {ranks} ranks: q, k and v of one take {nbytes / 2**30:.4g} GiB, "
            f"its node has {memory / 2**30:.4g} GiB"
        )


def misfit(nheads: int, nheads_kv: int, heads: int) -> str | None:
    """Give the reason that a head axis of that length cannot divide the heads; None if it can."""
    group = nheads // nheads_kv
    if nheads % heads:
        return f"{heads} does not divide {nheads} heads"
    own = nheads // heads
    if own % group and group % own:
        return f"{own} of {nheads} heads cut across groups of {group} that share a KV head"
    return None


def flops(area: int, nheads: int, headdim: int, backward: bool = False) -> int:
    """Floating point operations of attention over `area` visible pairs.

    Two products of 2 headdim operations a pair and head forward, five backward; exponentials are
    not counted.
    """
    return (10 if backward else 4) * area * nheads * headdim
