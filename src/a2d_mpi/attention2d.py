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

from collections.abc import Iterator

import numpy as np

from a2d_mpi.backend import Array
from a2d_mpi.comm import Channel, Gather, Partials, slices
from a2d_mpi.masks import intervals_of
from a2d_mpi.plan import AttentionPlan

ALL = None  # in place of a chunk: all chunks of the row's queries, or of the column's keys
Tensors = list[Array]


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
        grid, layer = self.grid, self._exchange
        self._row = Channel(grid.row_comm, "row", self.traffic)
        self._col = Channel(grid.col_comm, "col", self.traffic)
        q_parts, k_parts = self._tile_parts(grid.row, grid.col)
        self._q_counts, self._k_counts = [len(x) for x in q_parts], [len(x) for x in k_parts]
        # One of the two reductions of the backward pass is finished piece by piece and travels
        # while later pieces are computed; the other is left for the end: the smaller one.
        self._by_query = (grid.cols - 1) * layer.nheads >= 2 * (grid.rows - 1) * layer.nheads_kv
        pieces = dict.fromkeys([*self._pieces(by_query=True), *self._pieces(self._by_query)])
        self._intervals = intervals_of(self.mask, q_parts, k_parts, pieces)
        # Only among *sorted* keys is what a query sees an interval.
        order = np.argsort(np.concatenate(k_parts))
        self._sort = None if (np.diff(order) == 1).all() else order
        return self._row, self._col

    def _forward(self, q, k, v):
        queries = Gather(self._row, {"q": q}, self._q_counts, self._engine.work)
        keys = Gather(self._col, {"k": k, "v": v}, self._k_counts, self._engine.work)
        out, lse = (self._new(x, self.compute_dtype) for x in ("out", "lse"))
        # Partial outs are like q: they travel in the dtype of the tensors.
        partials = Partials(self._row, "out", [q, lse], self._engine.work, hold=not self.overlap)

        for i, j, (q_i,), (k_j, v_j) in self._steps(queries, keys, by_query=True):
            mine, first = i == self._row.rank, j == self._col.rank
            if mine and first:
                target = [out, lse]
            else:
                # One buffer per owner, as it is being sent; one for all chunks of my own.
                key = "own" if mine else i
                target = [self._buffer((x, key), x, len(q_i), wide=mine) for x in ("out", "lse")]
            with self._engine.clock("compute"):
                self._engine.tile.forward(q_i, k_j, v_j, self._intervals[i, j], *target)
            if not mine:
                partials.send(i, target)
            elif not first:
                with self._engine.clock("merge"):
                    self._engine.device.merge(out, lse, *target)

        partials.release()
        for partial in partials.receive():
            with self._engine.clock("merge"):
                self._engine.device.merge(out, lse, *partial)
        for transfer in (queries, keys, partials):
            transfer.finish()
        return out, lse

    def _backward(self, dout, q, k, v, lse, delta):
        q_side = {"dout": dout, "q": q, "lse": lse, "delta": delta}
        queries = Gather(self._row, q_side, self._q_counts, self._engine.work)
        keys = Gather(self._col, {"k": k, "v": v}, self._k_counts, self._engine.work)
        nq, nk = sum(self._q_counts), sum(self._k_counts)
        dq = self._buffer("dq", "dq", nq)
        dkv = dkv_sorted = [self._buffer(x, x, nk) for x in ("dk", "dv")]
        if self._by_query and self._sort is not None:
            dkv_sorted = [self._buffer((x, "sorted"), x, nk) for x in ("dk", "dv")]
        for x in (dq, *dkv, *dkv_sorted):
            self._engine.device.zero(x)
        dq_of = [dq[s] for s in slices(self._q_counts)]
        dkv_of = [[x[s] for x in dkv] for s in slices(self._k_counts)]
        dq_mine, (dk_mine, dv_mine) = dq_of[self._row.rank], dkv_of[self._col.rank]
        hold = not self.overlap
        dq_partials = Partials(self._row, "dq", [dq_mine], self._engine.work, hold)
        dkv_partials = Partials(self._col, "dkv", [dk_mine, dv_mine], self._engine.work, hold)

        for i, j, (dout_i, q_i, lse_i, delta_i), (k_j, v_j) in self._steps(
            queries, keys, self._by_query
        ):
            gradients = (dq if i is ALL else dq_of[i], *(dkv_sorted if j is ALL else dkv_of[j]))
            with self._engine.clock("compute"):
                self._engine.tile.backward(
                    dout_i, q_i, k_j, v_j, lse_i, delta_i, self._intervals[i, j], *gradients
                )
            if j is ALL:
                dq_partials.send(i, [dq_of[i]])
            elif i is ALL:
                dkv_partials.send(j, dkv_of[j])
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

    def _pieces(self, by_query: bool) -> list[tuple[int | None, int | None]]:
        """Pieces (query chunk, key chunk) of this rank's tile, in the order of the work.

        By query: my own queries meet each key chunk as it arrives, then the other owners' queries
        meet all keys at once, owner by owner.  By key: the same with the roles exchanged.
        """
        row, col = self._row, self._col
        if by_query:
            return [
                *((row.rank, j) for j in (col.rank, *col.peers)),
                *((i, ALL) for i in row.peers),
            ]
        return [
            *((i, col.rank) for i in (row.rank, *row.peers)),
            *((ALL, j) for j in col.peers),
        ]

    def _steps(
        self, queries: Gather, keys: Gather, by_query: bool
    ) -> Iterator[tuple[int | None, int | None, Tensors, Tensors]]:
        """Yield each piece, with the tensors of its queries and keys, when these are here."""
        if not self.overlap:
            queries.wait()
            keys.wait()
        sorted_keys = None
        for i, j in self._pieces(by_query):
            queries.wait(i)
            keys.wait(j)
            if j is ALL and sorted_keys is None:
                sorted_keys = self._sorted(keys.whole)
            yield (
                i,
                j,
                queries.whole if i is ALL else queries.chunk(i),
                sorted_keys if j is ALL else keys.chunk(j),
            )

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
