"""Attention2D: every rank of an R x C grid computes one tile.

Rank (r, c) meets the queries of grid row r with the keys of grid column c.  It gathers the former
along its row and the latter along its column, and each partial result goes to its owner: out to
the owner of the queries, in the backward pass dq likewise and dk, dv to the owner of the keys.  On
square grids what a rank receives falls as 1/sqrt(P).

Source: Elango, "Attention2D: Communication Efficient Distributed Self-Attention Mechanism",
arXiv:2503.15758.  The order of the work is ours: post everything, compute on what is here, send
what is finished, wait only for what is needed next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from a2d_mpi.core.meetings import Ranks
from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.steps import Attend, Merge, Message, Rows, Zero


class Tile:
    """The grid around a rank, and the order in which it computes its tile."""

    def __init__(self, s: Schedule) -> None:
        self.s, (rows, cols) = s, (s.sizes.rows, s.sizes.cols)
        r, c = s.rank // cols, s.rank % cols

        def at(row: Ranks, col: Ranks) -> Ranks:
            return row % rows * cols + col % cols

        # Nearest following first: no rank is everybody's first target.
        self.row_peers = [at(r, c + i) for i in range(1, cols)]
        self.col_peers = [at(r + i, c) for i in range(1, rows)]
        s.channels["row"] = tuple(at(r, j) for j in range(cols))
        s.channels["col"] = tuple(at(i, c) for i in range(rows))
        # The keys that queries meet on this rank and on each peer of its row, and the queries that
        # keys meet on this rank and on each peer of its column, by their owners.
        self.columns = [tuple(at(i, c + j) for i in range(rows)) for j in range(cols)]
        self.rows = [tuple(at(r + i, j) for j in range(cols)) for i in range(rows)]

    def gather(self, kind: str) -> None:
        """Gather the rows of queries along the row, those of keys along the column."""
        s = self.s
        own_q = s.array(f"own {kind}", kind, (s.rank,), "given")
        own_k = s.array("own kv", "kv", (s.rank,), "given")
        self.q, self.q_coming = s.all_gather("row", kind, own_q, self.row_peers, self.columns)
        self.k, self.k_coming = s.all_gather("col", "kv", own_k, self.col_peers, self.rows)

    def blocks(self, by_query: bool) -> Iterator[tuple[Rows, Rows]]:
        """Yield the queries and keys of each kernel call, when these are here.

        By query: the first part of this rank's own queries meets the keys of each owner as they
        come; then the others' queries, as they come, meet all keys at once; the rest of its own
        come last, while the others' partial results travel.  By key: the same with the roles
        exchanged.
        """
        s = self.s
        if not s.sizes.overlap:
            for coming in (self.q_coming, self.k_coming):
                self.wait([m for messages in coming.values() for m in messages])
        early = (self.q, self.q_coming, self.row_peers)
        late = (self.k, self.k_coming, self.col_peers)
        (x, x_coming, x_peers), (y, y_coming, y_peers) = (
            (early, late) if by_query else (late, early)
        )

        def pair(a: Rows, b: Rows) -> tuple[Rows, Rows]:
            return (a, b) if by_query else (b, a)

        first, *rest = s.parts(Rows(x, s.rank), Rows(y), len(x_peers) + 1)
        yield pair(Rows(x, s.rank, first), Rows(y, s.rank))
        for rows in self._as_they_come(y, y_coming, y_peers):
            yield pair(Rows(x, s.rank, first), rows)
        for rows in self._as_they_come(x, x_coming, x_peers):
            yield pair(rows, Rows(y))
        for part in rest:
            yield pair(Rows(x, s.rank, part), Rows(y))

    def wait(self, messages: Sequence[Message]) -> None:
        """Wait for messages that bring rows."""
        self.s.wait(messages)

    def place(self, queries: Rows) -> int:
        """Place of their owner among the peers of the row, from 1."""
        return next(i for i, p in enumerate(self.row_peers, 1) if p is queries.owner)

    def _as_they_come(
        self, array: str, coming: dict[int, list[Message]], peers: list[Ranks]
    ) -> Iterator[Rows]:
        for i in range(len(peers)):
            for message in coming[i]:
                if self.s.sizes.overlap:
                    self.wait([message])
                yield message.rows


def forward(s: Schedule) -> None:
    """Write down the forward pass of rank ``s.rank``."""
    tile = Tile(s)
    tile.gather("q")  # q: (C n, H, D); k, v: (R n, Hkv, D)
    out = s.array("out", "out", (s.rank,), "result")  # (n, H, D), and lse (n, H)
    coming = s.partials("row", "out", tile.row_peers, tile.columns)  # as large, from C - 1 peers
    for queries, keys in tile.blocks(by_query=True):
        if queries.owner is s.rank:
            s.add(Attend(queries, keys, Rows(out, s.rank, queries.part)))
        else:
            name = s.array(f"out to {tile.place(queries)}", "out", meets=tile.columns[0])
            partial = Rows(name, queries.owner, queries.part)
            s.add(Attend(queries, keys, partial))
            s.give("row", queries.owner, partial)
    s.release("row")
    for rows, messages, part in coming:
        s.wait(messages)
        s.add(Merge(rows, Rows(out, s.rank, part)))
    s.results = {"out": Rows(out, s.rank)}


def backward(s: Schedule) -> None:
    """Write down the backward pass of rank ``s.rank``."""
    tile, sizes = Tile(s), s.sizes
    tile.gather("qd")  # dout, q: (C n, H, D); lse, delta: (C n, H); k, v: (R n, Hkv, D)
    dq = s.array("dq", "dq", s.channels["row"], meets=tile.columns[0])  # (C n, H, D)
    dkv = s.array("dkv", "dkv", s.channels["col"], meets=tile.rows[0])  # dk, dv: (R n, Hkv, D)
    s.add(Zero(Rows(dq)), Zero(Rows(dkv)))
    dq_coming = s.partials("row", "dq", tile.row_peers, tile.columns)
    dkv_coming = s.partials("col", "dkv", tile.col_peers, tile.rows)
    by_query = gradients_by_query(sizes.rows, sizes.cols, sizes.nheads, sizes.nheads_kv)
    for queries, keys in tile.blocks(by_query):
        into, keys_into = queries._replace(array=dq), keys._replace(array=dkv)
        s.add(Attend(queries, keys, into, keys_into))
        # Finished: these queries have met all keys, or these keys all queries.
        if keys.owner is None and queries.owner is not s.rank:
            s.give("row", queries.owner, into)
        elif queries.owner is None and keys.owner is not s.rank:
            s.give("col", keys.owner, keys_into)
    late = ("row", dq, tile.row_peers, tile.columns)
    if by_query:
        late = ("col", dkv, tile.col_peers, tile.rows)
    channel, array, peers, (here, *_) = late
    for p in peers:
        for chunk in sizes.chunks(p, len(peers) + 1, by_query, here):
            s.give(channel, p, Rows(array, p, chunk))
    for channel, array, coming in (("row", dq, dq_coming), ("col", dkv, dkv_coming)):
        s.release(channel)
        for rows, messages, part in coming:
            s.wait(messages)
            s.add(Merge(rows, Rows(array, s.rank, part)))
    s.results = {"dq": Rows(dq, s.rank), "dkv": Rows(dkv, s.rank)}


def gradients_by_query(rows: int, cols: int, nheads: int, nheads_kv: int) -> bool:
    """Tell whether a grid finishes its partial dq one after the other, and dk, dv at the end.

    The larger of the two reductions of the backward pass is finished block by block: its results
    travel while later blocks are computed.  The smaller reduction is left for the end.
    """
    return (cols - 1) * nheads >= 2 * (rows - 1) * nheads_kv


def _known_as(layout: Layout) -> str:
    if layout.size == 1:
        return ""
    if layout.positions == 1:
        return "Ulysses"
    return "tree" if layout.rows == 1 else "all-gather" if layout.cols == 1 else ""


METHOD = Method(
    forward, backward, lambda layout: (layout.rows, layout.cols, ""), known_as=_known_as
)
