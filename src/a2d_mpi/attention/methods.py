"""Plans by method: a class for each of the package's methods."""

from __future__ import annotations

from typing import Any

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.masks.mask import Mask


class Attention2D(AttentionPlan):
    """Attention2D on a process grid, one tile for each rank; see `a2d_mpi.schedules.attention2d`.

    It has the interface of `AttentionPlan`.

    Notes
    -----
    The backward pass gathers q, dout, lse and delta along the row, and k and v along the column,
    once more.  So between the phases a caller keeps O(N / P), and `free` may release the buffers.
    With a head axis each context-parallel group does this for its share of the heads.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from a2d_mpi import Causal, ProcessGrid
    >>> attn = Attention2D(
    ...     ProcessGrid(MPI.COMM_SELF, 1, 1), Causal(), seqlen=6, nheads=2, headdim=4
    ... )
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, len(attn.tokens), 2, 4), np.float32)
    >>> out, lse = attn.forward(q, k, v)
    >>> out.shape, lse.shape, np.allclose(out[0], v[0])  # the first token sees itself
    ((6, 2, 4), (6, 2), True)
    """

    method = "attention2d"


class NodeAwareAttention(AttentionPlan):
    """Attention2D that sends each chunk to a node only once; see `a2d_mpi.schedules.line`.

    It has the interface of `AttentionPlan`.  The grid says which ranks share a node:
    `a2d_mpi.core.layout.Layout.nodes`.
    """

    method = "node aware"


class RingAttention(AttentionPlan):
    """Baseline: Ring Attention over all ranks of a context-parallel group.

    It has the interface of `AttentionPlan`.  The shape of the grid does not matter.  With a head
    axis it is USP (arXiv:2405.07719).
    """

    method = "ring"


class DoubleRingAttention(AttentionPlan):
    """Baseline: the rows of the grid are rings, and a ring of these rings joins them.

    It has the interface of `AttentionPlan`.  A grid of one row or one column is a single ring.
    With a head axis every context-parallel group is a double ring.  See
    `a2d_mpi.schedules.ring`.
    """

    method = "double ring"


class TriangleAttention(AttentionPlan):
    """Causal attention in equal parts of the triangle: each rank has the same number of pairs.

    It has the interface of `AttentionPlan`.  A context-parallel group has T (T-1) / 2 ranks: 1, 3,
    6, 10, 15, ...  The shape of the grid does not matter.  See `a2d_mpi.schedules.triangle`.
    """

    method = "triangle"


def plan_class(method: str) -> type[AttentionPlan]:
    """Return the class of the plans of a method of `a2d_mpi.schedules.method.METHODS`.

    A user's method needs no class in this file: this function makes one.
    """
    classes = {x.method: x for x in AttentionPlan.__subclasses__()}
    name = "".join(word.capitalize() for word in method.split()) + "Attention"
    return classes.get(method) or type(name, (AttentionPlan,), {"method": method})


def make_plan(method: str, grid: ProcessGrid, mask: Mask, **options: Any) -> AttentionPlan:
    """Make a plan by the name of its method; `options` are arguments of its class."""
    return plan_class(method)(grid, mask, **options)
