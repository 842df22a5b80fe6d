"""Ring Attention: every key and value passes every rank.

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
arXiv:2310.01889; with the zigzag distribution it is balanced for the causal mask.  Each step
computes on one chunk of K and V while the next one arrives and this one travels on.  In the
backward pass dK and dV follow their chunk around the ring, one step behind.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.backend import Array
from a2d_mpi.comm import Channel
from a2d_mpi.masks import intervals_of
from a2d_mpi.plan import AttentionPlan


class RingAttention(AttentionPlan):
    """The baseline: attention on a ring of all cells of the grid, whatever its shape.

    Parameters, attributes and methods are those of `AttentionPlan`.  With a head axis every layer
    is a ring (USP, arXiv:2405.07719).
    """

    method = "ring"

    def _set_up(self):
        self._ring = Channel(self.grid.layer_comm, "ring", self.traffic)
        ranks = range(self._ring.size)
        parts = [self._cells.tokens(rank) for rank in ranks]
        self._counts = [len(part) for part in parts]
        pieces = [(0, j) for j in ranks]
        self._intervals = intervals_of(self.mask, [self._cell_tokens], parts, pieces)
        return (self._ring,)

    def _forward(self, q, k, v):
        out, lse = (self._new(x, self.compute_dtype) for x in ("out", "lse"))
        partial = [self._buffer((x, "own"), x, len(q), wide=True) for x in ("out", "lse")]
        for j, (k_j, v_j) in self._chunks(k, v):
            target = [out, lse] if j == self._ring.rank else partial
            with self._engine.clock("compute"):
                self._engine.tile.forward(q, k_j, v_j, self._intervals[0, j], *target)
            if j != self._ring.rank:
                with self._engine.clock("merge"):
                    self._engine.device.merge(out, lse, *partial)
        return out, lse

    def _backward(self, dout, q, k, v, lse, delta):
        dq = self._buffer("dq", "dq", len(q))
        self._engine.device.zero(dq)
        travelling = []  # requests of the gradients on their way
        arrived = None
        for step, (j, (k_j, v_j)) in enumerate(self._chunks(k, v)):
            dkv = [self._buffer((x, "ring", step % 2), x, len(k_j)) for x in ("dk", "dv")]
            for x in dkv:
                self._engine.device.zero(x)
            with self._engine.clock("compute"):
                self._engine.tile.backward(
                    dout, q, k_j, v_j, lse, delta, self._intervals[0, j], dq, *dkv
                )
            # What the ranks before me added to the gradients of chunk j comes while I compute.
            self._ring.wait(travelling)
            if arrived is not None:
                with self._engine.clock("merge"):
                    for x, theirs in zip(dkv, arrived, strict=True):
                        self._engine.device.put(x, theirs, add=True)
            # The next gradients that I get are those of the next chunk, at last my own.
            n = self._counts[(j - 1) % self._ring.size]
            arrived = [self._buffer((x, "arrived", step % 2), x, n) for x in ("dk", "dv")]
            travelling += self._shift(dkv, arrived, tag=2)
            if not self.overlap:
                self._ring.wait(travelling)
        self._ring.wait(travelling)
        return dq, *arrived

    def _chunks(self, k, v):
        """Yield (owner, [k, v]) for every chunk, my own first, then those of the ranks before."""
        chunk = [k, v]
        size, rank = self._ring.size, self._ring.rank
        for step in range(size):
            j = (rank - step) % size
            coming = []
            if step < size - 1:
                n = self._counts[(j - 1) % size]
                following = [self._buffer((x, "ring", step % 2), x, n) for x in ("k", "v")]
                coming = self._shift(chunk, following, tag=0)
                if not self.overlap:
                    self._ring.wait(coming)
            yield j, chunk
            self._ring.wait(coming)
            if step < size - 1:
                chunk = following

    def _shift(self, mine: list[Array], following: list[Array], tag: int) -> list:
        """Start passing `mine` to the next rank and receiving `following` from the one before."""
        ring = self._ring
        return [
            *ring.irecv(following, (ring.rank - 1) % ring.size, tag),
            *ring.isend(mine, (ring.rank + 1) % ring.size, tag),
        ]

    def area(self, rank: int | None = None) -> int:
        rank = self.grid.comm.rank if rank is None else rank
        return self.mask.area(self._cells.tokens(rank // self.grid.heads), np.arange(self.seqlen))
