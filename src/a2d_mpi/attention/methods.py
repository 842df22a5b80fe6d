"""The plans that users hold: a method's name, and the arguments that are its own.

What a method does is written down in `a2d_mpi.schedules`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.masks import Mask
from a2d_mpi.core.sizes import Layout


class Attention2D(AttentionPlan):
    """Attention on a process grid, one tile per rank: `a2d_mpi.schedules.attention2d`.

    Parameters, attributes and methods are those of `AttentionPlan`.

    Notes
    -----
    Between `forward` and `backward` nothing gathered is kept: backward gathers q, dout, lse and
    delta along the row and k, v along the column anew, so what lives between them is O(N / P).
    With a head axis all this happens in each layer, for whole cells and some of the heads.
    """

    method = "attention2d"


class DoubleRingAttention(AttentionPlan):
    """The baseline: rings of `inner` consecutive cells and a ring of these rings.

    All parameters, attributes and methods but one are those of `AttentionPlan`.  With a head axis
    every layer is a double ring.  See `a2d_mpi.schedules.ring`.

    Parameters
    ----------
    inner : int, optional
        Cells of an inner ring, a divisor of their number; 1 and all of them both make a single
        ring.  Default: the grid's columns, so that each of its rows is an inner ring.

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
        return Layout(size // int(inner), int(inner), grid.heads, grid.layout.order)


class RingAttention(DoubleRingAttention):
    """The baseline: attention on a ring of all cells of the grid, whatever its shape.

    Parameters, attributes and methods are those of `AttentionPlan`.  With a head axis every layer
    is a ring (USP, arXiv:2405.07719).
    """

    method = "ring"

    def __init__(self, grid: ProcessGrid, mask: Mask, **others: Any) -> None:
        super().__init__(grid, mask, inner=grid.group_comm.size, **others)
