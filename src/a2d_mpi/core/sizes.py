"""Grids of ranks, the heads that fit them, and the work of a problem."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

# MPI counts are ints and some transports fail beyond 2 GiB: larger tensors go in several messages.
MAX_MESSAGE = 1 << 30  # bytes


class UnlikeRanks(ValueError):
    """Ranks whose steps are not the same: their schedules are not written all at once."""


@dataclass(frozen=True)
class Layout:
    """Ranks as rows x cols Ulysses groups of `heads` ranks each, and their places in the machine.

    Parameters
    ----------
    rows, cols, heads : int
        R, C and U.  The grid rank of (r, c, u) is ``(r C + c) U + u``; the U ranks of a head
        group share the heads.  Rings take the positions (r, c) one after the other; a double ring
        has R outer steps over inner rings of C positions.
    order : str
        A permutation of "rcu": the axes from the slowest to the fastest varying world rank.
        Nodes hold consecutive world ranks.
    block : (int, int)
        Rows and columns of the blocks of the grid whose ranks are neighbours: inside a block the
        world ranks follow each other, row by row; `order` is that of the blocks and the heads.
    nodes : tuple of int, optional
        Node of every grid rank, for methods whose schedules depend on it; see `on_nodes`.
        None: every rank is alone on its node.
    stream : bool
        Whether one side of a tile is streamed through two buffers, for methods that can.
    distribution : str, optional
        Of the tokens, if the planner has chosen one.
    """

    rows: int
    cols: int
    heads: int = 1
    order: str = "rcu"
    block: tuple[int, int] = (1, 1)
    nodes: tuple[int, ...] | None = None
    stream: bool = False
    distribution: str | None = None

    def __post_init__(self) -> None:
        if min(self.rows, self.cols, self.heads) < 1:
            raise ValueError(f"no grid has {self.rows} x {self.cols} x {self.heads} ranks")
        if sorted(str(self.order)) != ["c", "r", "u"]:
            raise ValueError(f"order must be a permutation of 'rcu', got {self.order!r}")
        if min(self.block) < 1 or self.rows % self.block[0] or self.cols % self.block[1]:
            block = "x".join(map(str, self.block))
            raise ValueError(f"no {block} blocks make a grid of {self.rows} x {self.cols}")
        if self.nodes is not None and len(self.nodes) != self.size:
            raise ValueError(f"{len(self.nodes)} nodes are given for {self.size} ranks")

    @property
    def positions(self) -> int:
        """R C, the positions of the grid: ranks of a context-parallel group."""
        return self.rows * self.cols

    @property
    def size(self) -> int:
        """P = R C U."""
        return self.positions * self.heads

    @property
    def numbering(self) -> str:
        """The order and, after a slash, the blocks if they are larger than a rank: "rcu/2x2"."""
        return self.order + f"/{self.block[0]}x{self.block[1]}" * (self.block != (1, 1))

    def world_ranks(self) -> np.ndarray:
        """World rank of every grid rank, (P,) int64."""
        br, bc = self.block
        sizes = {"r": self.rows // br, "c": self.cols // bc, "u": self.heads}
        ranks = np.arange(self.size).reshape([*(sizes[axis] for axis in self.order), br, bc])
        r, c, u = (self.order.index(axis) for axis in "rcu")
        return ranks.transpose(r, 3, c, 4, u).ravel()

    def nodes_of_group(self, head: int | None = None) -> tuple[int, ...] | None:
        """Nodes of the ranks of a context-parallel group; None: of every group.

        Raises
        ------
        UnlikeRanks
            If that is asked of all groups, and they differ.
        """
        if self.nodes is None:
            return None
        groups = np.reshape(self.nodes, (-1, self.heads)).T  # (heads, positions)
        if head is not None:
            return tuple(groups[head].tolist())
        names = [np.unique(x, return_index=True, return_inverse=True)[1:] for x in groups]
        found = {tuple(first[inverse].tolist()) for first, inverse in names}
        if len(found) > 1:
            raise UnlikeRanks("the context-parallel groups are not divided among the nodes alike")
        return found.pop()

    def on_nodes(self, node: Sequence[int] | np.ndarray) -> Layout:
        """The layout with the node of every world rank, whatever the nodes are called."""
        _, first, names = np.unique(
            np.asarray(node)[self.world_ranks()], return_index=True, return_inverse=True
        )
        nodes = None if len(first) == self.size else tuple(first[names].tolist())
        return replace(self, nodes=nodes)


def squarest(ranks: int) -> tuple[int, int]:
    """Rows and columns of a grid of so many ranks: as square as it can be, rows <= columns."""
    rows = next(r for r in range(math.isqrt(ranks), 0, -1) if ranks % r == 0)
    return rows, ranks // rows


def check_memory(what: str, nbytes: int, sharing: int = 1) -> None:
    """Refuse a problem that cannot fit, before anything is allocated for it.

    Parameters
    ----------
    what : str
        The arrays, in the plural.
    nbytes : int
        Bytes of these on one rank.
    sharing : int
        Ranks that share the memory of the node, and need as much each.

    Raises
    ------
    ValueError
        If the memory of this node is smaller.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes * sharing > memory:
        shared = f" for {sharing} ranks" * (sharing > 1)
        raise ValueError(
            f"{what} take {nbytes / 2**30:.4g} GiB, its node has {memory / 2**30:.4g} GiB{shared}"
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


def flops(
    area: int, nheads: int, headdim: int, backward: bool = False, headdim_v: int | None = None
) -> int:
    """Floating point operations of attention over `area` visible pairs.

    Two products a pair and head forward, five backward: of 2 headdim operations logits, dq and dk;
    of 2 headdim_v (default: headdim) out, dv and the gradient of probabilities.  Exponentials are
    not counted.
    """
    values = headdim if headdim_v is None else headdim_v
    products = 3 * headdim + 2 * values if backward else headdim + values
    return 2 * area * nheads * products


def parse_count(text: str) -> int:
    """A whole number from "65536" or "64K"; K, M and G are powers of 1024.

    Raises
    ------
    ValueError
    """
    found = re.fullmatch(r"\s*([+-]?[0-9]{1,18})([KMG]?)\s*", text)
    if not found:
        raise ValueError(f"{text[:40]!r} is no whole number")
    return int(found[1]) << 10 * " KMG".index(found[2] or " ")
