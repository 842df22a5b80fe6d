"""Double-Ring-Attention: rings inside groups of ranks, and a ring of these groups.

Gu et al., "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism",
arXiv:2406.18485, section 4.3.  Rank p is at place p % inner of group p // inner.  K and V go
round the group, as in Ring Attention.  Meanwhile, for as long as that takes, the block that a rank
began with travels to the same place in the next group, which begins its next round with it.  With
a group on each node all ranks use the network all the time, instead of the last of each node only.

    P = 6, inner = 3   place 0     place 1     place 2
             group 0  [ rank 0 -->  rank 1 -->  rank 2 ]  blocks 0 1 2 in round 0, 3 4 5 in round 1
             group 1  [ rank 3 -->  rank 4 -->  rank 5 ]  blocks 3 4 5 in round 0, 0 1 2 in round 1
                          inner hops: one each step; outer hops, downwards: one each round

In the backward pass dK and dV follow their block, one step behind.  After a round they make one
more inner hop, to where the block began it: that is what the group adds to the gradients.  The sum
over groups travels to the next one during that one's next round, and from the last one home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.channel import Channel
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.masks import Mask
from a2d_mpi.core.sizes import Layout
from a2d_mpi.devices.protocol import Array


class DoubleRingAttention(AttentionPlan):
    """The baseline: attention on rings of `inner` consecutive cells and a ring of these rings.

    All parameters, attributes and methods but one are those of `AttentionPlan`.  With a head axis
    every layer is a double ring.

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
    _inner_name = "inner"  # of the channel, in the counters

    def __init__(
        self, grid: ProcessGrid, mask: Mask, *, inner: int | None = None, **others: Any
    ) -> None:
        self.inner = inner
        super().__init__(grid, mask, **others)

    @property
    def _options(self):
        return {"inner": self.inner}

    def _set_up(self):
        comm, inner = self.grid.layer_comm, self.inner
        if inner is None:
            inner = self.grid.cols
        if not isinstance(inner, (int, np.integer)) or inner < 1 or comm.size % inner:
            raise ValueError(f"inner must be a divisor of the {comm.size} ranks, got {inner!r}")
        self.inner = int(inner)
        # Groups of one rank are themselves one ring, whose hops are outer ones.
        single = self.inner == 1
        self._places = comm.size if single else self.inner
        self._groups = comm.size // self._places
        name = "outer" if single else self._inner_name
        self._inner = _Ring(comm, name, self.traffic, self._owner(0, 1), self._owner(0, -1))
        self._outer = _Ring(comm, "outer", self.traffic, self._owner(1, 0), self._owner(-1, 0))
        parts = [self._cells.tokens(rank) for rank in range(comm.size)]
        self._counts = [len(part) for part in parts]
        self._intervals = [self.mask.intervals(self._cell_tokens, part) for part in parts]
        return self._inner, self._outer

    def _forward(self, q, k, v):
        out, lse, rest = self._running_out()
        partial = [self._buffer((x, "own"), x, len(q), wide=True) for x in ("out", "lse")]
        for j, (k_j, v_j) in self._blocks(k, v):
            mine = j == self.grid.layer_comm.rank
            target = [out, lse] if mine else partial
            with self._engine.clock("compute"):
                self._engine.tile.forward(q, k_j, v_j, self._intervals[j], *target)
            if not mine:
                with self._engine.clock("merge"):
                    self._engine.device.merge(out, lse, rest, *partial)
        return out, lse

    def _backward(self, dout, q, k, v, lse, delta):
        inner, outer = self._inner, self._outer
        dq = self._buffer("dq", "dq", len(q))
        self._engine.device.zero(dq)
        travelling, leaving = [], []  # messages of gradients on inner and outer hops
        arrived = total = None  # what they bring: sums over ranks of a group, over groups
        for step, (j, (k_j, v_j)) in enumerate(self._blocks(k, v)):
            dkv = self._gradients("ring", step, j)
            for x in dkv:
                self._engine.device.zero(x)
            with self._engine.clock("compute"):
                self._engine.tile.backward(
                    dout, q, k_j, v_j, lse, delta, self._intervals[j], dq, *dkv
                )
            # What the ranks before me added to the gradients of block j comes while I compute.
            # At the beginning of a round: those of the block with which I began the last one.
            inner.wait(travelling)
            s, t = divmod(step, self._places)
            if t > 0:
                self._put(dkv, arrived, add=True)
            elif s > 0:
                total = self._leave(s - 1, arrived, total, leaving)
            # The next gradients that I get are those of the next block, at last the round's first.
            arrived = self._gradients("arrived", step, self._owner(s, t + 1))
            travelling += inner.shift(dkv, arrived, tag=2)
            if not self.overlap:
                inner.wait(travelling)
        inner.wait(travelling)
        if self._groups == 1:
            return dq, *arrived
        total = self._leave(self._groups - 1, arrived, total, leaving)
        outer.wait(leaving)
        return dq, *total

    def _blocks(self, k: Array, v: Array) -> Iterator[tuple[int, list[Array]]]:
        """Yield (owner, [k, v]) for every block, round by round, my own first."""
        inner, outer = self._inner, self._outer
        first = [k, v]
        for s in range(self._groups):
            block, leaving = first, []
            if s < self._groups - 1:
                n = self._counts[self._owner(s + 1, 0)]
                first = [self._buffer((x, "outer", s % 2), x, n) for x in ("k", "v")]
                leaving = outer.shift(block, first, tag=0)
                if not self.overlap:
                    outer.wait(leaving)
            for t in range(self._places):
                following, travelling = block, []
                if t < self._places - 1:
                    n = self._counts[self._owner(s, t + 1)]
                    following = [self._buffer((x, "ring", t % 2), x, n) for x in ("k", "v")]
                    travelling = inner.shift(block, following, tag=0)
                    if not self.overlap:
                        inner.wait(travelling)
                yield self._owner(s, t), block
                inner.wait(travelling)
                block = following
            outer.wait(leaving)

    def _leave(
        self, s: int, group: list[Array], total: list[Array] | None, leaving: list[Any]
    ) -> list[Array]:
        """Pass on the gradients of the block with which I began round `s`.

        `group`: what my group added to them; `total`: the other groups before it, on its way
        with the messages `leaving`.  Returns where those of the next round's block will be, on
        their way with `leaving` again.
        """
        self._outer.wait(leaving)
        if s == 0:
            total = self._gradients("outer", s, self._owner(s, 0))
        self._put(total, group, add=s > 0)
        following = self._gradients("outer", s + 1, self._owner(s + 1, 0))
        leaving += self._outer.shift(total, following, tag=2)
        if not self.overlap:
            self._outer.wait(leaving)
        return following

    def _gradients(self, use: str, step: int, owner: int) -> list[Array]:
        """One of two buffers in turn, for dk and dv of the block of `owner`."""
        n = self._counts[owner]
        return [self._buffer((x, use, step % 2), x, n) for x in ("dk", "dv")]

    def _put(self, to: list[Array], theirs: list[Array], add: bool) -> None:
        with self._engine.clock("merge"):
            for x, y in zip(to, theirs, strict=True):
                self._engine.device.put(x, y, add=add)

    def _owner(self, s: int, t: int) -> int:
        """Owner of the block that I have at step `t` of round `s`: so many places before me."""
        group, place = divmod(self.grid.layer_comm.rank, self._places)
        return (group - s) % self._groups * self._places + (place - t) % self._places

    def area(self, rank: int | None = None) -> int:
        rank = self.grid.comm.rank if rank is None else rank
        return self.mask.area(self._cells.tokens(rank // self.grid.heads), np.arange(self.seqlen))

    @property
    def layout(self) -> Layout:
        grid = self.grid
        return Layout(
            grid.layer_comm.size // self.inner, self.inner, grid.heads, grid.layout.order
        )


class _Ring(Channel):
    """A channel from the rank `before` me and to the rank `after` me."""

    def __init__(self, comm, name, traffic, before: int, after: int) -> None:
        super().__init__(comm, name, traffic)
        self._before, self._after = before, after

    def shift(self, mine: list[Array], following: list[Array], tag: int) -> list[Any]:
        """Start passing `mine` on and receiving `following`."""
        return [
            *self.irecv(following, self._before, tag),
            *self.isend(mine, self._after, tag),
        ]
