"""Attention2D: every rank of an R x C grid computes one tile.

Rank (r, c) computes the queries of grid row r against the keys of grid column c.  It gathers the
queries along its row and the keys along its column.  Each partial result goes to its owner: out to
the owner of the queries; in the backward pass dq likewise, and dk, dv to the owner of the keys.
On square grids the bytes that a rank receives fall as 1/sqrt(P).

Source: Elango, "Attention2D: Communication Efficient Distributed Self-Attention Mechanism",
arXiv:2503.15758.  The order of the work is ours: post everything, compute on what is here, send
what is finished, wait only for what is needed next.
"""

from __future__ import annotations

from collections.abc import Iterator

from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.collectives import Coming, Partials, all_gather
from a2d_mpi.schedules.group import chunked
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Rows


class Tile:
    """The grid around a rank, the gathered rows of its tile, and the order of its kernel calls.

    Parameters
    ----------
    p : Program
    kind : str
        Of the queries' rows: "q" or "qd".
    """

    def __init__(self, p: Program, kind: str) -> None:
        self.p, (rows, cols) = p, (p.group.rows, p.group.cols)
        r, c = divmod(p.rank, cols)
        # Nearest following first: no rank is everybody's first target.
        self.row_peers = [r * cols + (c + i) % cols for i in range(1, cols)]
        self.col_peers = [(r + i) % rows * cols + c for i in range(1, rows)]
        p.channels["row"] = tuple(p.group.row_of(p.rank))
        p.channels["col"] = tuple(p.group.column_of(p.rank))
        self.own_q, self.own_k = (
            p.own(f"own {kind}", kind, "given"),
            p.own("own kv", "kv", "given"),
        )
        self.gather()

    def required_queries(self, owner: int, member: int) -> Runs:
        """Places of the owner's queries that see keys of the member's column."""
        return self.p.group.required(False, owner, self.p.group.column_of(member))

    def required_keys(self, owner: int, member: int) -> Runs:
        """Places of the owner's keys that queries of the member's row see."""
        return self.p.group.required(True, owner, self.p.group.row_of(member))

    def gather(self) -> None:
        """Gather the rows of queries along the row, and the rows of keys along the column."""
        row = "row", self.own_q.array, self.row_peers, self.required_queries
        col = "col", self.own_k.array, self.col_peers, self.required_keys
        self.q, self.q_coming = all_gather(self.p, *row)
        self.k, self.k_coming = all_gather(self.p, *col)

    def calls(self, by_query: bool) -> Iterator[tuple[int | None, Rows, int | None, Rows]]:
        """Yield owner and rows of the queries, then of the keys, of each kernel call, when here.

        By query: the first part of this rank's own queries meets the keys of each owner as these
        arrive.  Then the other owners' queries, as they arrive, meet all keys at once (owner
        None).  The rest of its own queries comes last, while partial results travel.  By key: the
        same with the roles exchanged.
        """
        p, rank = self.p, self.p.rank
        if not p.group.overlap:
            self.wait(self.q_coming)
            self.wait(self.k_coming)
        if by_query:
            first, *rest = p.split_own(False, p.channels["col"], p.group.cols)
            own = p.rows(self.q, rank, first)
            yield rank, own, rank, p.rows(self.k, rank)
            for owner, keys in self._arriving(self.k_coming):
                yield rank, own, owner, keys
            for owner, queries in self._arriving(self.q_coming):
                yield owner, queries, None, p.rows(p.sorted(self.k))
            for part in rest:
                yield rank, p.rows(self.q, rank, part), None, p.rows(p.sorted(self.k))
        else:
            first, *rest = p.split_own(True, p.channels["row"], p.group.rows)
            own = p.rows(self.k, rank, first)
            yield rank, p.rows(self.q, rank), rank, own
            for owner, queries in self._arriving(self.q_coming):
                yield owner, queries, rank, own
            for owner, keys in self._arriving(self.k_coming):
                yield None, p.rows(self.q), owner, keys
            for part in rest:
                yield None, p.rows(self.q), rank, p.rows(self.k, rank, part)

    def _arriving(self, coming: Coming) -> Iterator[tuple[int, Rows]]:
        """Wait for each message in turn; yield the owner and the rows that it brings."""
        for owner, message in coming:
            if self.p.group.overlap:
                self.wait([(owner, message)])
            yield owner, message.rows

    def wait(self, coming: Coming) -> None:
        """Wait for messages that bring rows."""
        self.p.wait(message for _, message in coming)


def forward(p: Program) -> None:
    """Write the forward pass of a rank."""
    tile = Tile(p, "q")  # q: (C n, H, D); k, v: (R n, Hkv, D)
    out = p.own("out", "out", "result")  # (n, H, D), and lse (n, H)
    partials = Partials(p, "row", "out", tile.row_peers, tile.required_queries)
    for owner, queries, _, keys in tile.calls(by_query=True):
        if owner == p.rank:
            p.attend(queries, keys, p.matching(out.array, queries))
        else:
            places = tile.required_queries(owner, p.rank)
            name = p.array(f"out to {owner}", "out", [(owner, places)])
            partial = p.matching(name, queries)
            p.attend(queries, keys, partial)
            p.give("row", owner, partial)
    partials.combine(out.array)
    p.results = {"out": out}


def backward(p: Program) -> None:
    """Write the backward pass of a rank."""
    group = p.group
    tile = Tile(p, "qd")  # dout, q: (C n, H, D); lse, delta: (C n, H); k, v: (R n, Hkv, D)
    by_query = gradients_by_query(group.rows, group.cols, group.nheads, group.nheads_kv)
    dq = p.sums("dq", "dq", tile.q)  # (C n, H, D)
    dkv = p.sums("dkv", "dkv", tile.k, by_token=by_query)  # dk, dv: (R n, Hkv, D)
    dq_partials = Partials(p, "row", "dq", tile.row_peers, tile.required_queries)
    dkv_partials = Partials(p, "col", "dkv", tile.col_peers, tile.required_keys)
    for q_owner, queries, k_owner, keys in tile.calls(by_query):
        into, keys_into = dq(queries), dkv(keys)
        p.differentiate(queries, keys, into, keys_into)
        # Finished: these queries have met all keys, or these keys all queries.
        if k_owner is None and q_owner != p.rank:
            p.give("row", q_owner, into)
        elif q_owner is None and k_owner != p.rank:
            p.give("col", k_owner, keys_into)
    if by_query:
        for peer in tile.col_peers:
            for chunk in chunked(tile.required_keys(peer, p.rank), group.rows):
                p.give("col", peer, p.rows("dkv", peer, chunk))
    else:
        for peer in tile.row_peers:
            for chunk in chunked(tile.required_queries(peer, p.rank), group.cols):
                p.give("row", peer, p.rows("dq", peer, chunk))
    dq_partials.combine("dq")
    dkv_partials.combine("dkv")
    p.results = {"dq": p.rows("dq", p.rank), "dkv": p.rows("dkv", p.rank)}


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
