"""Seconds that a method takes on a machine: its schedule, walked through for all ranks at once.

All ranks set out together.  Each computes the pieces of its tile in the order of the algorithm
and waits for what is not there yet.  Links are shared evenly: what is posted together arrives as
if every message got an equal part of the link, what is sent later queues behind it; the ranks of
a node share its NICs by what they have to move.  A ring's message cannot leave before both sides
have posted it.  What a transfer takes from the core of its receiver is the link's ``1 - hidden``.
This module does not import MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from a2d_mpi.core import chunks
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.cost import METHODS
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.schedule import Hop, Partials, Schedule, Workload

Units = list[list[Hop | None]]  # by step, mine first: the messages that bring a chunk, or None


@dataclass(frozen=True)
class Phase:
    """Seconds of every logical rank, each (P,) float64; their sum is `total`.

    The parts are those of ``AttentionPlan.timings``; `other` is what these leave out: setting
    out, posting messages, copies and zeros.
    """

    compute: np.ndarray
    merge: np.ndarray
    wait: np.ndarray
    other: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Seconds of every rank."""
        return self.compute + self.merge + self.wait + self.other


def predict(
    machine: Machine,
    method: str,
    layout: Layout,
    work: Workload,
    distribution: str | None = None,
) -> dict[str, Phase]:
    """Seconds of every rank, by phase.

    Parameters
    ----------
    machine : Machine
    method : str
        One of `a2d_mpi.planning.cost.METHODS`.
    layout : Layout
    work : Workload
    distribution : str, optional
        Default: the one that the method takes for the mask.

    Raises
    ------
    ValueError
        If the heads do not fit the layout, or the machine has no kernel for the dtype.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; one of {METHODS}")
    name = distribution or work.distribution(method)
    kind = {"attention2d": Grid, "double ring": DoubleRing}.get(method, Ring)
    return {
        phase: Phase(**kind(machine, layout, work, name, phase).walk()) for phase in work.phases
    }


class Grid(Schedule):
    """Attention2D: see `a2d_mpi.attention.methods`."""

    def run(self) -> None:
        p, n, back = self.layer, self.n, self.backward
        row_peers = [self.at(self.row, self.col + k) for k in range(1, self.cols)]
        col_peers = [self.at(self.row + k, self.col) for k in range(1, self.rows)]
        q_size, tensors = (2 * p.q + 2 * p.lse, 4) if back else (p.q, 1)
        q_back, k_back = (p.dq, p.dkv) if back else (p.q + p.lse, 0)
        self.share_links([
            *((peer, n * (q_size + q_back)) for peer in row_peers),
            *((peer, n * (p.kv + k_back)) for peer in col_peers),
        ])  # fmt: skip
        self.nq = self.counts.reshape(self.rows, -1).sum(axis=1)[self.row]
        self.nk = self.counts.reshape(self.rows, -1).sum(axis=0)[self.col]
        zeros = self.nq * p.dq + self.nk * p.dkv if back else 0
        mine = n * (q_size * (self.cols > 1) + p.kv * (self.rows > 1))
        self.spend("other", self.copying(zeros + mine))
        q_in, k_in = self.gather([(row_peers, q_size, tensors), (col_peers, p.kv, 2)])
        if not self.overlap:
            for hop in (*q_in, *k_in):
                self.wait(hop)
            q_in, k_in = ([(0 * done, 0 * due) for done, due in x] for x in (q_in, k_in))
        q_in, k_in = self._units(q_in), self._units(k_in)
        if back:
            self._backward(row_peers, col_peers, q_in, k_in)
            return
        partials = Partials(self, row_peers, q_back, 2)
        self._tile(True, q_in, k_in, partials.send, self.merge_outs)
        partials.collect(self.merge_outs)

    def _backward(self, row_peers: list, col_peers: list, q_in: Units, k_in: Units) -> None:
        p = self.layer
        dq, dkv = Partials(self, row_peers, p.dq, 1), Partials(self, col_peers, p.dkv, 2)
        by_query = chunks.gradients_by_query(self.rows, self.cols, p.nheads, p.nheads_kv)
        early, late = (dq, dkv) if by_query else (dkv, dq)
        self._tile(by_query, q_in, k_in, early.send)
        if late is dkv and self._sorts:
            self.spend("merge", self.copying(self.nk * p.dkv))
        for k in range(len(late.peers)):
            late.send(k)
        for partials in (dq, dkv):
            adding = self.copying(self.n * partials.per_token)
            partials.collect(lambda adding=adding: self.spend("merge", adding))
        self.spend("other", self.copying(self.n * (p.dq + p.dkv)))

    @property
    def _sorts(self) -> bool:
        """Whether the keys of a column come out of order."""
        return self.rows > 1 and self.distribution != "contiguous"

    def _tile(
        self,
        by_query: bool,
        q_in: Units,
        k_in: Units,
        send: Callable[[int, float], None],
        merge: Callable[[float], None] | None = None,
    ) -> None:
        """The pieces of `a2d_mpi.attention.methods.Attention2D`, in the same order.

        By query: the first of my queries against each unit of keys, the others' against all keys,
        the rest of mine; by key: the same with the roles exchanged.  `send`: a share of what is
        for a peer is finished; `merge`: another partial result of the first of mine is.
        """
        early, late = (q_in, k_in) if by_query else (k_in, q_in)
        first = self._first(len(early))
        for step, units in enumerate(late):
            other = self._cell(step, keys=by_query)
            pair = (self.cell, other) if by_query else (other, self.cell)
            for unit in units:
                self._wait_for(unit)
                self.compute_pair(*pair, first / len(units))
                if unit and merge:
                    merge(first)
        if by_query:  # queries of a cell, all keys of a column
            area, cut = (x.reshape(len(x), self.rows, -1).sum(1) for x in (self.area, self.cut))
        else:  # all queries of a row, keys of a cell
            area, cut = (x.reshape(self.rows, -1, len(x)).sum(1) for x in (self.area, self.cut))
        if by_query and self._sorts and len(early) > 1:
            self.spend("merge", self.copying(self.nk * self.layer.kv))
        for step in (*range(1, len(early)), *[0] * (first < 1)):
            mine = self._cell(step, keys=not by_query)
            where = (mine, self.col) if by_query else (self.row, mine)
            share = (1 if step else 1 - first) / len(early[step])
            n, cut_here = share * self.counts[mine], (share if by_query else 1) * cut[where]
            nq, nk = (n, self.nk) if by_query else (self.nq, n)
            for unit in early[step]:
                self._wait_for(unit)
                self.compute(share * area[where], nq, nk, np.minimum(nq, cut_here))
                if unit:
                    send(step - 1, share)

    def _wait_for(self, unit: Hop | None) -> None:
        """For a unit of another rank; my own is here."""
        if unit:
            self.wait(unit)

    def _first(self, ranks: int) -> float:
        """Share of my own chunk that does not wait for the end."""
        return chunks.FIRST_SHARE if chunks.splits_own_shard(self.counts.min(), ranks) else 1.0

    def _units(self, hops: list[Hop]) -> Units:
        """When the units of each chunk arrive, mine first; two of them one after the other."""
        if len(hops) == 1 and len(chunks.chunks(int(self.counts.min()), 2)) == 2:
            ((done, due),) = hops
            halfway = (done + np.minimum(self.now, done)) / 2
            return [[None], [(halfway, due / 2), (done, due / 2)]]
        return [[None], *([hop] for hop in hops)]

    def _cell(self, step: int, keys: bool) -> np.ndarray:
        """The cell whose keys come to me along the column, or queries along the row, at a step."""
        row, col = (self.row + step, self.col) if keys else (self.row, self.col + step)
        return self.at(row, col) // self.layout.heads


class Ring(Schedule):
    """RingAttention, whatever the distribution: see `a2d_mpi.attention.methods`."""

    def run(self) -> None:
        heads, cells = self.layout.heads, self.layout.positions
        to, came_from = (((self.cell + k) % cells) * heads + self.u for k in (1, -1))
        ring = self.route(to), came_from
        self.share_links([(to, self.n)])
        block, travelling = self.cell, None
        for step in range(cells):
            travelling = self._step(block, step == 0, ring, travelling, step < cells - 1)
            block = block[came_from]
        if travelling:
            self.wait(travelling)

    def _step(
        self, block: np.ndarray, first: bool, ring: tuple, travelling: Hop | None, pass_on: bool
    ) -> Hop | None:
        """Compute on a block of keys while the next one comes, and this one goes on if `pass_on`.

        `travelling`: the gradients of the block, which follow one step behind.
        """
        p, n_block = self.layer, self.counts[block]
        coming = self.hop(ring, n_block * p.kv) if pass_on else None
        if self.backward:
            self.spend("other", self.copying(n_block * p.dkv))  # zeros
        self.compute_pair(self.cell, block)
        if not self.backward:
            if not first:
                self.merge_outs()
        else:
            if travelling:
                self.wait(travelling)
                self.spend("merge", self.copying(n_block * p.dkv))
            alone = ring[1][0] == 0  # rank 0 gets its own, and so do all
            travelling = None if alone else self.hop(ring, n_block * p.dkv)
        if coming:
            self.wait(coming)
        return travelling


class DoubleRing(Ring):
    """Rings of C cells inside a ring of R: Gu et al., "LoongTrain", arXiv:2406.18485."""

    def run(self) -> None:
        p, rows, cols = self.layer, self.rows, self.cols
        inner, outer = (
            (self.route(self.at(self.row + i, self.col + j)), self.at(self.row - i, self.col - j))
            for i, j in ((0, 1), (1, 0))
        )
        self.share_links([
            (inner[0].to, self.n * (cols - 1.0)),
            (outer[0].to, self.n * (rows > 1)),
        ])  # fmt: skip
        travelling, turn = None, cols == 1  # else an outer hop has the time of a round
        first = self.cell
        for s in range(rows):
            block, start = first, self.counts[first]
            coming = self.hop(outer, start * p.kv, turn) if s < rows - 1 else None
            for t in range(cols):
                travelling = self._step(block, s == t == 0, inner, travelling, t < cols - 1)
                block = block[inner[1]]
            first = first[outer[1]]
            if self.backward and rows > 1:
                if travelling:  # back where their round began, before they leave for the next
                    self.wait(travelling)
                travelling = self.hop(outer, start * p.dkv, turn)
            if coming:
                self.wait(coming)
        if travelling:
            self.wait(travelling)
