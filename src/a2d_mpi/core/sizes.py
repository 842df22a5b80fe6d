"""Grids of ranks, the division of heads among them, and the work of a problem."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

# MPI counts are ints, and some transports fail beyond 2 GiB: larger tensors are sent in pieces.
MAX_MESSAGE = 1 << 30  # bytes


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
        If a size is below 1, the order is no permutation, the blocks do not divide the grid, or
        the number of nodes is not the number of ranks.
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
        if self.nodes is not None and len(self.nodes) != self.size:
            raise ValueError(
                f"nodes must have a node for each of {self.size} ranks, got {len(self.nodes)}"
            )

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

    @property
    def in_equal_nodes(self) -> bool:
        """True if nodes divide all rows, and all columns, into equal groups of several ranks.

        Rows or columns, not both, may lie inside nodes or have one rank per node.  All
        context-parallel groups must be divided in the same way.
        """
        divisions = {self.nodes_of_group(head) for head in range(self.heads)}
        if self.nodes is None or len(divisions) > 1:
            return False
        grid = np.reshape(divisions.pop(), (self.rows, self.cols))
        shares, lengths = (_equal_share(grid), _equal_share(grid.T)), (self.cols, self.rows)
        return min(shares) > 0 and any(1 < b < n for b, n in zip(shares, lengths))

    def on_nodes(self, node: Sequence[int] | np.ndarray) -> Layout:
        """Return the layout with nodes, from a number for the node of every world rank."""
        nodes = _by_first_rank(np.asarray(node)[self.world_ranks()])
        return replace(self, nodes=None if len(set(nodes)) == self.size else nodes)


def _by_first_rank(node: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Return the node of every rank as the number of the first rank on this node."""
    _, first, place = np.unique(node, return_index=True, return_inverse=True)
    return tuple(first[place].tolist())


def _equal_share(node: np.ndarray) -> int:
    """Return how many ranks of a line each of its nodes has; 0 if the numbers differ.

    `node` is (lines, ranks of a line) int.
    """
    lines = np.arange(len(node))[:, None] * (node.max() + 1)
    _, counts = np.unique(lines + node, return_counts=True)
    return int(counts[0]) if (counts == counts[0]).all() else 0


def next_ranks(rank: int, size: int) -> list[int]:
    """Return the other ranks, from the next one on: so ranks do not all send to rank 0 first."""
    return [(rank + i) % size for i in range(1, size)]


def squarest(ranks: int) -> tuple[int, int]:
    """Return rows and columns of the most nearly square grid of `ranks`; rows <= columns."""
    rows = next(r for r in range(math.isqrt(ranks), 0, -1) if ranks % r == 0)
    return rows, ranks // rows


def whole_number(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return an integer as int; raise ValueError unless it is from `least` to `most`."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < least:
        kind = "a positive integer" if least == 1 else f"a whole number of at least {least}"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    if most is not None and value > most:
        digits = int(value).bit_length() * math.log10(2)
        shown = value if digits < 30 else f"a number of {digits:.0f} digits"
        raise ValueError(f"{name} must be at most {most}, got {shown}")
    return int(value)


def check_memory(what: str, nbytes: int, sharing: int = 1) -> None:
    """Refuse a problem that cannot fit, before anything is allocated for it.

    Parameters
    ----------
    what : str
        Name of the arrays, in the plural, for the message.
    nbytes : int
        Bytes of the arrays on one rank.
    sharing : int
        Number of ranks that share the memory of the node.  Each needs `nbytes`.

    Raises
    ------
    ValueError
        If the memory of this node is smaller.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes * sharing > memory:
        shared = f" for {sharing} ranks" * (sharing > 1)
        raise ValueError(
            f"{what} take {nbytes / 2**30:.4g} GiB, but its node has {memory / 2**30:.4g} GiB"
            + shared
        )


def misfit(nheads: int, nheads_kv: int, heads: int) -> str | None:
    """Return the reason why `heads` ranks cannot share the heads; None if they can."""
    group = nheads // nheads_kv
    if nheads % heads:
        return f"{heads} does not divide {nheads} heads"
    own = nheads // heads
    if own % group and group % own:
        return (
            f"a rank has {own} of {nheads} heads, and {group} heads share a KV head: neither of "
            f"{own} and {group} divides the other"
        )
    return None


def flops(
    area: int, nheads: int, headdim: int, backward: bool = False, headdim_v: int | None = None
) -> int:
    """Return the floating-point operations of attention over `area` visible pairs.

    Each pair and head takes two products forward and five backward.  The products for the logits,
    dq and dk take 2 headdim operations each.  The products for out, dv and the gradient of the
    probabilities take 2 headdim_v operations each.  Exponentials are not counted.

    Parameters
    ----------
    area : int
        Visible (query, key) pairs.
    nheads, headdim : int
        Query heads, and elements of a head.
    backward : bool
    headdim_v : int, optional
        Elements of a head of v.  Default: headdim.
    """
    values = headdim if headdim_v is None else headdim_v
    products = 3 * headdim + 2 * values if backward else headdim + values
    return 2 * area * nheads * products


def parse_count(text: str) -> int:
    """Read a whole number, "65536" or "64K"; K, M and G are powers of 1024.

    Raises
    ------
    ValueError
    """
    match = re.fullmatch(r"\s*([+-]?[0-9]{1,18})([KMG]?)\s*", text)
    if not match:
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")


def check_range(most: float, **arrays: np.ndarray) -> None:
    """Raise ValueError if an array has a number below 0, or above `most`."""
    for name, x in arrays.items():
        wrong = np.argwhere((x < 0) | (x > most))
        if len(wrong):
            place = tuple(wrong[0])
            index = ", ".join(map(str, place))
            raise ValueError(f"{name}[{index}] must be 0 to {most}, got {x[place]}")
