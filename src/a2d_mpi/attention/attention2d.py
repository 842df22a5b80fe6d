"""Attention2D: exact attention on an R x C grid.

Rank (r, c) computes one tile: the queries of grid row r against the keys of grid column c.  It
receives the former along its row and the latter along its column, and sends each partial result
to its owner: out to the owner of the queries, in the backward pass dq likewise and dk, dv to the
owner of the keys.  On square grids a rank's traffic falls as 1/sqrt(P).

Source: Elango, "Attention2D: Communication Efficient Distributed Self-Attention Mechanism",
arXiv:2503.15758.  The order of the work is ours: post everything, compute on what is here, send
what is finished, wait only for what is needed next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.channel import Channel
from a2d_mpi.comm.collectives import Gather, Partials, slices
from a2d_mpi.core.masks import key_areas, query_areas
from a2d_mpi.core.pieces import cut, cut_own, gradients_by_query, keeps_own
from a2d_mpi.devices.protocol import Array


class Unit(NamedTuple):
    """Some tokens of a chunk: for others than my own, what one message brings."""

    owner: int | None
    number: int | None = None  # of the chunk's cuts; None: the whole chunk


ALL = Unit(None)  # all chunks of the row's queries, or of the column's keys
Piece = tuple[Unit, Unit]  # queries, keys
Tensors = list[Array]


class Side:
    """The queries of a tile, or its keys: chunks of the ranks of a row, or of a column.

    Parameters
    ----------
    channel : Channel
    parts : list of (n,) int64
        Tokens of each chunk.
    """

    def __init__(self, channel: Channel, parts: list[np.ndarray]) -> None:
        self.channel, self.parts = channel, parts
        self.counts = [len(x) for x in parts]
        self.cuts = [cut(n, channel.size) for n in self.counts]
        self.mine = parts[channel.rank]
        self.whole = np.concatenate(parts)

    def cut_mine(self, areas: Callable[[], np.ndarray]) -> None:
        """Cut my own chunk into what I do first and last; `areas`: my pairs of its tokens."""
        if keeps_own(len(self.mine), self.channel.size):
            self.cuts[self.channel.rank] = cut_own(areas(), self.channel.size)

    def rows(self, unit: Unit) -> slice:
        """Where a unit lies in its chunk."""
        return slice(None) if unit.number is None else self.cuts[unit.owner][unit.number]

    def units(self, owners: list[int]) -> list[Unit]:
        """What these chunks are cut into."""
        return [Unit(owner, u) for owner in owners for u in range(len(self.cuts[owner]))]

    def tokens(self, unit: Unit) -> np.ndarray:
        """Global indices, owner by owner."""
        return self.whole if unit is ALL else self.parts[unit.owner][self.rows(unit)]

    def tensors(self, gathered: Gather, unit: Unit) -> Tensors:
        """A unit of each gathered tensor."""
        if unit is ALL:
            return gathered.whole
        return [x[self.rows(unit)] for x in gathered.chunk(unit.owner)]


class Attention2D(AttentionPlan):
    """Attention on a process grid, one tile per rank.

    Parameters, attributes and methods are those of `AttentionPlan`.

    Notes
    -----
    Between `forward` and `backward` nothing gathered is kept: backward gathers q, dout, lse and
    delta along the row and k, v along the column anew, so what lives between them is O(N / P).
    With a head axis all this happens in each layer, for whole cells and some of the heads.
    """

    method = "attention2d"

    def _set_up(self):
        grid, heads = self.grid, self._exchange
        row = self._row = Channel(grid.row_comm, "row", self.traffic)
        col = self._col = Channel(grid.col_comm, "col", self.traffic)
        q_parts, k_parts = self._tile_parts(grid.row, grid.col)
        q = self._queries = Side(row, q_parts)
        k = self._keys = Side(col, k_parts)
        # Only among *sorted* keys is what a query sees an interval.
        order = np.argsort(k.whole)
        self._sort = None if (np.diff(order) == 1).all() else order
        k_sorted = k.whole[order]
        self._by_query = gradients_by_query(grid.rows, grid.cols, heads.nheads, heads.nheads_kv)
        see = self.mask.intervals
        q.cut_mine(lambda: query_areas(see(q.mine, k_sorted)))
        if not self._by_query:
            k.cut_mine(lambda: key_areas(see(q.whole, k.mine), len(k.mine)))
        self._intervals = {
            (x, y): see(q.tokens(x), k_sorted if y is ALL else k.tokens(y))
            for x, y in {*self._pieces(by_query=True), *self._pieces(self._by_query)}
        }
        return row, col

    def _forward(self, q, k, v):
        queries = Gather(self._row, {"q": q}, self._queries.counts, self._engine.work)
        keys = Gather(self._col, {"k": k, "v": v}, self._keys.counts, self._engine.work)
        out, lse, rest = self._running_out()
        # Partial outs are like q: they travel in the dtype of the tensors.
        partials = Partials(self._row, "out", [q, lse], self._engine.work, hold=not self.overlap)

        for (x, y), (q_x,), (k_y, v_y) in self._steps(queries, keys, by_query=True):
            rows, mine = self._queries.rows(x), x.owner == self._row.rank
            fresh = mine and (y is ALL or y.owner == self._col.rank)
            to = [out, lse] if fresh else self._partial_out(x.owner)
            target = [t[rows] for t in to]
            with self._engine.clock("compute"):
                self._engine.tile.forward(q_x, k_y, v_y, self._intervals[x, y], *target)
            if not mine:
                partials.send(x.owner, to, x.number)
            elif not fresh:
                with self._engine.clock("merge"):
                    self._engine.device.merge(out[rows], lse[rows], rest[rows], *target)

        partials.release()
        for partial in partials.receive():
            with self._engine.clock("merge"):
                self._engine.device.merge(out, lse, rest, *partial)
        for transfer in (queries, keys, partials):
            transfer.finish()
        return out, lse

    def _backward(self, dout, q, k, v, lse, delta):
        q_side = {"dout": dout, "q": q, "lse": lse, "delta": delta}
        queries = Gather(self._row, q_side, self._queries.counts, self._engine.work)
        keys = Gather(self._col, {"k": k, "v": v}, self._keys.counts, self._engine.work)
        nq, nk = len(self._queries.whole), len(self._keys.whole)
        dq = self._buffer("dq", "dq", nq)
        dkv = dkv_sorted = [self._buffer(x, x, nk) for x in ("dk", "dv")]
        if self._by_query and self._sort is not None:
            dkv_sorted = [self._buffer((x, "sorted"), x, nk) for x in ("dk", "dv")]
        for x in (dq, *dkv, *dkv_sorted):
            self._engine.device.zero(x)
        dq_of = [dq[s] for s in slices(self._queries.counts)]
        dkv_of = [[x[s] for x in dkv] for s in slices(self._keys.counts)]
        dq_mine, (dk_mine, dv_mine) = dq_of[self._row.rank], dkv_of[self._col.rank]
        hold = not self.overlap
        dq_partials = Partials(self._row, "dq", [dq_mine], self._engine.work, hold)
        dkv_partials = Partials(self._col, "dkv", [dk_mine, dv_mine], self._engine.work, hold)

        for (x, y), (dout_x, q_x, lse_x, delta_x), (k_y, v_y) in self._steps(
            queries, keys, self._by_query
        ):
            gradients = (
                dq if x is ALL else dq_of[x.owner][self._queries.rows(x)],
                *(dkv_sorted if y is ALL else (t[self._keys.rows(y)] for t in dkv_of[y.owner])),
            )
            with self._engine.clock("compute"):
                self._engine.tile.backward(
                    dout_x, q_x, k_y, v_y, lse_x, delta_x, self._intervals[x, y], *gradients
                )
            if y is ALL and x.owner != self._row.rank:
                dq_partials.send(x.owner, [dq_of[x.owner]], x.number)
            elif x is ALL and y.owner != self._col.rank:
                dkv_partials.send(y.owner, dkv_of[y.owner], y.number)
        if self._by_query:
            if dkv_sorted is not dkv:
                with self._engine.clock("merge"):
                    for x, x_sorted in zip(dkv, dkv_sorted, strict=True):
                        self._engine.device.add_at(x, x_sorted, self._engine.upload(self._sort))
            for j in self._col.peers:
                dkv_partials.send(j, dkv_of[j])
        else:
            for i in self._row.peers:
                dq_partials.send(i, [dq_of[i]])

        for partials, mine in ((dq_partials, [dq_mine]), (dkv_partials, [dk_mine, dv_mine])):
            partials.release()
            for partial in partials.receive():
                with self._engine.clock("merge"):
                    for x, contribution in zip(mine, partial, strict=True):
                        self._engine.device.put(x, contribution, add=True)
        for transfer in (queries, keys, dq_partials, dkv_partials):
            transfer.finish()
        return dq_mine, dk_mine, dv_mine

    def _pieces(self, by_query: bool) -> list[Piece]:
        """Pieces of this rank's tile, in the order of the work.

        By query: the first of my own queries meet each key chunk as it arrives, then the other
        owners' queries meet all keys at once, owner by owner; the rest of my own come last, while
        the partial results of the others travel.  By key: the same with the roles exchanged.
        """
        early, late = (self._queries, self._keys) if by_query else (self._keys, self._queries)
        mine, *rest = early.units([early.channel.rank])
        found = [
            *((mine, y) for y in (Unit(late.channel.rank), *late.units(late.channel.peers))),
            *((x, ALL) for x in (*early.units(early.channel.peers), *rest)),
        ]
        return found if by_query else [(y, x) for x, y in found]

    def _steps(
        self, queries: Gather, keys: Gather, by_query: bool
    ) -> Iterator[tuple[Piece, Tensors, Tensors]]:
        """Yield each piece, with the tensors of its queries and keys, when these are here."""
        if not self.overlap:
            queries.wait()
            keys.wait()
        sorted_keys = None
        for x, y in self._pieces(by_query):
            queries.wait(*x)
            keys.wait(*y)
            if y is ALL and sorted_keys is None:
                sorted_keys = self._sorted(keys.whole)
            k = sorted_keys if y is ALL else self._keys.tensors(keys, y)
            yield (x, y), self._queries.tensors(queries, x), k

    def _partial_out(self, owner: int) -> Tensors:
        """Buffers for queries of an owner: as they are sent; for my own as they are computed."""
        mine, n = owner == self._row.rank, self._queries.counts[owner]
        return [
            self._buffer((x, "own" if mine else owner), x, n, wide=mine) for x in ("out", "lse")
        ]

    def _sorted(self, tensors: Tensors) -> Tensors:
        if self._sort is None:
            return tensors
        with self._engine.clock("merge"):
            found = [self._buffer((name, "sorted"), name, len(tensors[0])) for name in "kv"]
            for to, x in zip(found, tensors, strict=True):
                self._engine.device.take(to, x, self._engine.upload(self._sort))
            return found

    def _tile_parts(self, row: int, col: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Tokens of each owner of the queries and of the keys of the tile at (row, col)."""
        rows, cols, tokens = self.grid.rows, self.grid.cols, self._cells.tokens
        return (
            [tokens(row * cols + c) for c in range(cols)],
            [tokens(r * cols + col) for r in range(rows)],
        )

    def area(self, rank: int | None = None) -> int:
        rank = self.grid.comm.rank if rank is None else rank
        queries, keys = self._tile_parts(*divmod(rank // self.grid.heads, self.grid.cols))
        return self.mask.area(np.concatenate(queries), np.sort(np.concatenate(keys)))
