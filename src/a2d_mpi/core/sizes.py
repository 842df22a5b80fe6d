"""Sizes of a problem and of a grid of ranks: what they are, and what they may be."""

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
        Tokens of every rank (of its part before any exchange of heads), by logical rank; the
        parts of the U ranks of a cell follow each other.
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
        """What one of `heads` layers works on: the tokens of whole cells, its share of the heads.

        Raises
        ------
        ValueError
            If the heads cannot be shared out so.
        """
        why = misfit(self.nheads, self.nheads_kv, heads)
        if why:
            raise ValueError(why)
        cells = tuple(np.reshape(self.counts, (-1, heads)).sum(axis=1).tolist())
        kv = max(1, self.nheads_kv // heads)
        return Problem(
            cells, self.nheads // heads, kv, self.headdim, self.itemsize, self.compute_itemsize
        )


@dataclass(frozen=True)
class Layout:
    """Ranks as rows x cols cells of `heads` ranks each, and where they lie in the machine.

    Parameters
    ----------
    rows, cols, heads : int
        R, C and U.  The logical rank of (r, c, u) is ``(r C + c) U + u``; the U ranks of a cell
        share the heads.  Rings take the cells one after the other; a double ring has R outer
        steps over inner rings of C cells.
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
        """R C, the ranks of a layer."""
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
    """Raise ValueError unless the sizes of a problem, by the names in `LARGEST`, can be."""
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
    """Refuse what cannot be, before anything walks over all tokens.

    Raises
    ------
    ValueError
        If q, k and v of a rank, a third or less of what it needs, fill the memory of its node.
    """
    nbytes = -(-seqlen // ranks) * (nheads + 2 * nheads_kv) * headdim * itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        raise ValueError(
            f"{seqlen} tokens on {ranks} ranks: q, k and v of one take {nbytes / 2**30:.4g} GiB, "
            f"its node has {memory / 2**30:.4g} GiB"
        )


def misfit(nheads: int, nheads_kv: int, heads: int) -> str | None:
    """Why a head axis of that length cannot share out the heads; None if it can."""
    group = nheads // nheads_kv
    if nheads % heads:
        return f"{heads} does not divide {nheads} heads"
    mine = nheads // heads
    if mine % group and group % mine:
        return f"{mine} of {nheads} heads cut across groups of {group} that share a key head"
    return None


def flops(area: int, nheads: int, headdim: int, backward: bool = False) -> int:
    """Floating point operations of attention over `area` visible pairs.

    Two products of 2 headdim operations a pair and head forward, five backward; exponentials are
    not counted.
    """
    return (10 if backward else 4) * area * nheads * headdim
