"""Grids of ranks, the heads that fit them, and the work of a problem."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# MPI counts are ints and some transports fail beyond 2 GiB: larger tensors go in several messages.
MAX_MESSAGE = 1 << 30  # bytes


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
