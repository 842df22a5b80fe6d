"""Plans by method: a name of `a2d_mpi.schedules.METHODS`, and the method's own arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.mask import Mask


class Attention2D(AttentionPlan):
    """Attention on a process grid, one tile a rank; see `a2d_mpi.schedules.attention2d`.

    All parameters, attributes and methods but one are those of `AttentionPlan`.

    Parameters
    ----------
    stream : bool, optional
        Hold one side of the tile only: the keys in the forward pass, the smaller side in the
        backward pass.  The shards of the other side, and its partial results, pass through two
        buffers.  Bytes and messages are the same, and so are out and lse, bit for bit; gradients
        are added in another order.  Default: if the grid was made by `ProcessGrid.auto`, and only
        a streamed plan fits in memory.

    Notes
    -----
    Gathered tensors are not kept between `forward` and `backward`: backward gathers q, dout, lse
    and delta along the row and k, v along the column anew, so that memory between the phases is
    O(N / P).  With a head axis each context-parallel group does this for its share of the heads.
    """

    method = "attention2d"

    def __init__(
        self, grid: ProcessGrid, mask: Mask, *, stream: bool | None = None, **others: Any
    ) -> None:
        self.stream = grid.layout.stream if stream is None else stream
        super().__init__(grid, mask, **others)

    @property
    def _options(self) -> dict[str, object]:
        return {"stream": self.stream}

    @property
    def layout(self) -> Layout:
        if self.stream not in (True, False):
            raise ValueError(f"stream must be true or false, got {self.stream!r}")
        return replace(self.grid.layout, stream=bool(self.stream))


class NodeAwareAttention(AttentionPlan):
    """Attention2D that sends a chunk to a node once; see `a2d_mpi.schedules.node_aware`.

    Parameters, attributes and methods are those of `AttentionPlan`.  Which ranks share a node is
    the grid's: `a2d_mpi.core.sizes.Layout.nodes`.
    """

    method = "node aware"


class RingAttention(AttentionPlan):
    """Baseline: attention on a ring of all ranks of a context-parallel group, whatever its shape.

    Parameters, attributes and methods are those of `AttentionPlan`.  With a head axis it is USP
    (arXiv:2405.07719).
    """

    method = "ring"


class DoubleRingAttention(AttentionPlan):
    """Baseline: rings of `inner` consecutive ranks and a ring of these rings.

    All parameters, attributes and methods but one are those of `AttentionPlan`.  With a head axis
    every context-parallel group is a double ring.  See `a2d_mpi.schedules.ring`.

    Parameters
    ----------
    inner : int, optional
        Ranks of an inner ring, a divisor of the size of a context-parallel group.  1 and that size
        both make a single ring.  Default: the grid's columns: each of its rows is an inner ring.

    Attributes
    ----------
    inner : int
    """

    method = "double ring"

    def __init__(
        self, grid: ProcessGrid, mask: Mask, *, inner: int | None = None, **others: Any
    ) -> None:
        self.inner = grid.cols if inner is None else inner
        super().__init__(grid, mask, **others)

    @property
    def _options(self) -> dict[str, object]:
        return {"inner": self.layout.cols}

    @property
    def layout(self) -> Layout:
        grid, size, inner = self.grid, self.grid.group_comm.size, self.inner
        if not isinstance(inner, (int, np.integer)) or inner < 1 or size % inner:
            raise ValueError(f"inner must be a divisor of the {size} ranks, got {inner!r}")
        if inner == grid.cols:
            return grid.layout
        return Layout(size // int(inner), int(inner), grid.heads, grid.layout.order)


class TriangleAttention(AttentionPlan):
    """Causal attention, partitioned so that all ranks have the same area and no half-empty tile.

    Parameters, attributes and methods are those of `AttentionPlan`.  A context-parallel group has
    T (T-1) / 2 ranks: 1, 3, 6, 10, 15, ...  The shape of the grid does not matter.  See
    `a2d_mpi.schedules.triangle`.
    """

    method = "triangle"


class BlocksAttention(AttentionPlan):
    """Attention by blocks of tokens that an optimiser placed, for any mask and number of ranks.

    Parameters, attributes and methods are those of `AttentionPlan`; `distribution` is that of the
    placement.  The grid's shape does not matter, its head axis does.  Every rank places the blocks
    by itself, which takes up to some seconds.  See `a2d_mpi.schedules.blocks`.
    """

    method = "blocks"


def plan_class(method: str) -> type[AttentionPlan]:
    """Class of the plans of a method of `a2d_mpi.schedules.METHODS`.

    A method without arguments of its own needs no class above: this function makes it.
    """
    known = {x.method: x for x in AttentionPlan.__subclasses__()}
    name = "".join(word.capitalize() for word in method.split()) + "Attention"
    return known.get(method) or type(name, (AttentionPlan,), {"method": method})


def make_plan(method: str, grid: ProcessGrid, mask: Mask, **options: Any) -> AttentionPlan:
    """Make the plan of a method by its name; other arguments as of `AttentionPlan`."""
    return plan_class(method)(grid, mask, **options)
