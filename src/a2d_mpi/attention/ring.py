"""Ring Attention: every key and value passes every rank.

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
arXiv:2310.01889; with the zigzag distribution it is balanced for the causal mask, with the striped
one it is Striped Attention (arXiv:2311.09431).  Each step computes on one block of K and V while
the next one arrives and this one travels on.  In the backward pass dK and dV follow their block
around the ring, one step behind.

It is the double ring with a single group: see `a2d_mpi.attention.double_ring` for the loops.
"""

from __future__ import annotations

from typing import Any

from a2d_mpi.attention.double_ring import DoubleRingAttention
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.masks import Mask


class RingAttention(DoubleRingAttention):
    """The baseline: attention on a ring of all cells of the grid, whatever its shape.

    Parameters, attributes and methods are those of `AttentionPlan`.  With a head axis every layer
    is a ring (USP, arXiv:2405.07719).
    """

    method = "ring"
    _inner_name = "ring"

    def __init__(self, grid: ProcessGrid, mask: Mask, **others: Any) -> None:
        super().__init__(grid, mask, inner=grid.layer_comm.size, **others)
