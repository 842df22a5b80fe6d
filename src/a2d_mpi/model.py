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

from a2d_mpi import cost
from a2d_mpi.cost import METHODS, Layout
from a2d_mpi.machine import Machine
from a2d_mpi.schedule import Hop, Partials, Schedule, Workload

Units = list[list[Hop]]  # by peer: the messages that bring its chunk


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
        One of `a2d_mpi.cost.METHODS`.
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
    """Attention2D: see `a2d_mpi.attention2d`."""

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
        self._by_query(q_in, k_in, partials.send, self.merge_outs)
        partials.collect(self.merge_outs)

    def _backward(self, row_peers: list, col_peers: list, q_in: Units, k_in: Units) -> None:
        p = self.layer
        dq, dkv = Partials(self, row_peers, p.dq, 1), Partials(self, col_peers, p.dkv, 2)
        if (self.cols - 1) * p.nheads >= 2 * (self.rows - 1) * p.nheads_kv:
            late = dkv
            self._by_query(q_in, k_in, dq.send)
        else:
            late = dq
            self._by_key(q_in, k_in, dkv.send)
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

    def _by_query(self, q_in: Units, k_in: Units, send: Callable, merge: Callable | None = None):
        """The first of my queries against each unit of keys, the others' against all keys, the
        rest of mine.
        """
        first = self._first(self.cols)
        for j in range(self.rows):
            k = self._cell_at(self.row + j, self.col)
            units = k_in[j - 1] if j else [None]
            for unit in units:
                if unit:
                    self.wait(unit)
                self.compute_pair(self.cell, k, first / len(units))
                if unit and merge:
                    merge(first)
        area, cut = (x.reshape(len(x), self.rows, -1).sum(axis=1) for x in (self.area, self.cut))
        for i in range(1, self.cols + (first < 1)):
            if i == 1 and self._sorts:
                self.spend("merge", self.copying(self.nk * self.layer.kv))
            q = self._cell_at(self.row, self.col + i)
            where = (q, self.col)
            units = q_in[i - 1] if i < self.cols else [None]
            share = (1 if i < self.cols else 1 - first) / len(units)
            for unit in units:
                if unit:
                    self.wait(unit)
                nq = share * self.counts[q]
                sizes = share * area[where], nq, self.nk, np.minimum(nq, share * cut[where])
                self.compute(*sizes)
                if unit:
                    send(i - 1, share)

    def _by_key(self, q_in: Units, k_in: Units, send: Callable) -> None:
        """Each unit of queries against the first of my keys, all queries against the others' keys
        and then the rest of mine.
        """
        first = self._first(self.rows)
        for i in range(self.cols):
            q = self._cell_at(self.row, self.col + i)
            units = q_in[i - 1] if i else [None]
            for unit in units:
                if unit:
                    self.wait(unit)
                self.compute_pair(q, self.cell, first / len(units))
        area, cut = (
            x.reshape(self.rows, -1, x.shape[1]).sum(axis=1) for x in (self.area, self.cut)
        )
        for j in range(1, self.rows + (first < 1)):
            k = self._cell_at(self.row + j, self.col)
            where = (self.row, k)
            units = k_in[j - 1] if j < self.rows else [None]
            share = (1 if j < self.rows else 1 - first) / len(units)
            for unit in units:
                if unit:
                    self.wait(unit)
                nk = share * self.counts[k]
                self.compute(share * area[where], self.nq, nk, np.minimum(self.nq, cut[where]))
                if unit:
                    send(j - 1, share)

    def _first(self, ranks: int) -> float:
        """Share of my own chunk that does not wait for the end."""
        return cost.FIRST if ranks > 1 and self.counts.min() >= 2 * cost.GRAIN else 1.0

    def _units(self, hops: list[Hop]) -> Units:
        """When the units of each chunk arrive; two of them one after the other."""
        if len(hops) == 1 and len(cost.cut(int(self.counts.min()), 2)) == 2:
            ((done, due),) = hops
            return [[((done + np.minimum(self.now, done)) / 2, due / 2), (done, due / 2)]]
        return [[hop] for hop in hops]

    def _cell_at(self, row: np.ndarray, col: np.ndarray) -> np.ndarray:
        return self.at(row, col) // self.layout.heads


class Ring(Schedule):
    """RingAttention, whatever the distribution: see `a2d_mpi.baselines.ring`."""

    def run(self) -> None:
        heads, cells = self.layout.heads, self.layout.cells
        ring = tuple(((self.cell + k) % cells) * heads + self.u for k in (1, -1))
        self.share_links([(ring[0], self.n)])
        travelling = None
        for step in range(cells):
            block = (self.cell - step) % cells
            travelling = self._step(block, step == 0, ring, travelling, step < cells - 1)
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
            alone = (ring[0] == ring[1]).all() and (ring[0] == np.arange(len(self.n))).all()
            travelling = None if alone else self.hop(ring, n_block * p.dkv)
        if coming:
            self.wait(coming)
        return travelling


class DoubleRing(Ring):
    """Rings of C cells inside a ring of R: Gu et al., "LoongTrain", arXiv:2406.18485."""

    def run(self) -> None:
        p, rows, cols = self.layer, self.rows, self.cols
        inner, outer = (
            tuple(self.at(self.row + k * down, self.col + k * (1 - down)) for k in (1, -1))
            for down in (0, 1)
        )
        self.share_links([(inner[0], self.n * (cols - 1.0)), (outer[0], self.n * (rows > 1))])
        travelling = None
        for s in range(rows):
            start = self.counts[self.at(self.row - s, self.col) // self.layout.heads]
            coming = self.hop(outer, start * p.kv) if s < rows - 1 else None
            for t in range(cols):
                block = self.at(self.row - s, self.col - t) // self.layout.heads
                travelling = self._step(block, s == t == 0, inner, travelling, t < cols - 1)
            if self.backward and rows > 1:
                if travelling:  # back where their round began, before they leave for the next
                    self.wait(travelling)
                travelling = self.hop(outer, start * p.dkv)
            if coming:
                self.wait(coming)
        if travelling:
            self.wait(travelling)
