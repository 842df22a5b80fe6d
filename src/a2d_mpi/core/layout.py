"""The grid of ranks of a plan, as data: its shape, the world rank and the node of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Layout:
    """A grid of rows x cols Ulysses groups of `heads` ranks each, and the world rank of each rank.

    Parameters
    ----------
    rows, cols, heads : int
        R, C and U.  The grid rank of (r, c, u) is ``(r C + c) U + u``.  The U ranks of a Ulysses
        group share the heads.  Rings take the positions (r, c) one after the other.  A double
        ring has R outer steps over inner rings of C positions.
    order : str
        A permutation of "rcu": the axes from the slowest to the fastest varying world rank.
        Nodes hold consecutive world ranks.
    block : (int, int)
        Rows and columns of the blocks into which the grid is divided.  The world ranks of a block
        are consecutive, row by row.  `order` then orders blocks and heads.
    nodes : tuple of int, optional
        Node of every grid rank, for methods whose schedules depend on it; see `on_nodes`.
        None: every rank is alone on its node.
    distribution : str, optional
        Distribution of the tokens, if the planner has chosen one.
    slices : (int, int), optional
        Slices of a rank's heads in the forward and in the backward pass, if they were chosen; see
        `a2d_mpi.schedules.pipeline`.  None: one slice.

    Raises
    ------
    ValueError
        If a size is below 1, the order is no permutation, or the blocks do not divide the grid.
    """

    rows: int
    cols: int
    heads: int = 1
    order: str = "rcu"
    block: tuple[int, int] = (1, 1)
    nodes: tuple[int, ...] | None = None
    distribution: str | None = None
    slices: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if min(self.rows, self.cols, self.heads) < 1:
            raise ValueError(
                f"a grid needs at least one rank, got {self.rows} x {self.cols} x {self.heads}"
            )
        if sorted(str(self.order)) != ["c", "r", "u"]:
            raise ValueError(f"order must be a permutation of 'rcu', got {self.order!r}")
        if min(self.block) < 1 or self.rows % self.block[0] or self.cols % self.block[1]:
            block = "x".join(map(str, self.block))
            raise ValueError(f"{block} blocks do not divide a grid of {self.rows} x {self.cols}")

    @property
    def positions(self) -> int:
        """Number of grid positions, R C: the ranks of a context-parallel group."""
        return self.rows * self.cols

    @property
    def size(self) -> int:
        """Number of ranks, P = R C U."""
        return self.positions * self.heads

    @property
    def shape(self) -> str:
        """Text of the shape, ROWSxCOLSxHEADS: "4x4x1"."""
        return f"{self.rows}x{self.cols}x{self.heads}"

    @property
    def sliced(self) -> str:
        """Text of `slices`, FORWARDxBACKWARD: "2x4"; "1x1" if they are not chosen yet."""
        return "x".join(map(str, self.slices or (1, 1)))

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the grid in files."""
        names = "rows", "cols", "heads", "order"
        block = "x".join(map(str, self.block))
        return {"ranks": self.size, **{x: getattr(self, x) for x in names}, "block": block}

    @property
    def numbering(self) -> str:
        """Text of `order` and, if blocks are larger than one rank, of `block`: "rcu/2x2"."""
        return self.order + f"/{self.block[0]}x{self.block[1]}" * (self.block != (1, 1))

    def world_ranks(self) -> np.ndarray:
        """Return the world rank of every grid rank, (P,) int64."""
        br, bc = self.block
        sizes = {"r": self.rows // br, "c": self.cols // bc, "u": self.heads}
        ranks = np.arange(self.size).reshape([*(sizes[axis] for axis in self.order), br, bc])
        r, c, u = (self.order.index(axis) for axis in "rcu")
        return ranks.transpose(r, 3, c, 4, u).ravel()

    def nodes_of_group(self, head: int) -> tuple[int, ...] | None:
        """Return the node of every rank of a context-parallel group; None without `nodes`.

        A node has the number of its first rank in the group.
        """
        return None if self.nodes is None else _by_first_rank(self.nodes[head :: self.heads])

    def on_nodes(self, node: Sequence[int] | np.ndarray) -> Layout:
        """Return the layout with nodes, from a number for the node of every world rank."""
        nodes = _by_first_rank(np.asarray(node)[self.world_ranks()])
        return replace(self, nodes=None if len(set(nodes)) == self.size else nodes)


def _by_first_rank(node: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Return the node of every rank as the number of the first rank on this node."""
    _, first, place = np.unique(node, return_index=True, return_inverse=True)
    return tuple(first[place].tolist())
