"""Attention2D: every rank of an R x C grid computes one tile.

Rank (r, c) computes the queries of grid row r against the keys of grid column c.  It gathers the
queries along its row and the keys along its column.  Each partial result goes to its owner.
Partial out and dq go to the owner of the queries, and partial dk and dv to the owner of the keys.
On square grids the bytes that a rank receives fall as 1/sqrt(P).

Source: Elango, "Attention2D: Communication Efficient Distributed Self-Attention Mechanism",
arXiv:2503.15758.  The order of the work is ours.  A rank posts all receives first, computes on the
rows that have arrived, sends finished results at once, and waits only for the rows of the next
call.  If the mask lets some ranks gather less than others, gathers come before returns.  Links are
shared fairly, so an early partial result would delay keys that another rank still waits for.
"""

from __future__ import annotations

from collections.abc import Iterator

from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.chunks import chunked, split_own
from a2d_mpi.schedules.collectives import Incoming, Partials, all_gather
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Rows


class Tile:
    """The grid around a rank, the gathered rows of its tile, and the order of its kernel calls.

    Parameters
    ----------
    p : Program
    kind : {"q", "qd"}
        Kind of the queries' rows, forward and backward.
    by_query : bool
        Order of the kernel calls, see `calls`.
    """

    def __init__(self, p: Program, kind: str, by_query: bool) -> None:
        self.p, self.by_query, (rows, cols) = p, by_query, (p.group.rows, p.group.cols)
        r, c = divmod(p.rank, cols)
        # Every rank begins with the next rank, so that no rank is the first target of all.
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
        """Return the places of the owner's queries that see keys of the member's column."""
        return self.p.group.required(False, owner, self.p.group.column_of(member))

    def required_keys(self, owner: int, member: int) -> Runs:
        """Return the places of the owner's keys that queries of the member's row see."""
        return self.p.group.required(True, owner, self.p.group.row_of(member))

    def gather(self) -> None:
        """Gather the rows of queries along the row, and the rows of keys along the column."""
        own_q, own_k = self.own_q.array, self.own_k.array
        row = "row", own_q, self.row_peers, self.required_queries
        col = "col", own_k, self.col_peers, self.required_keys
        self.q, self.q_coming = all_gather(self.p, *row)
        self.k, self.k_coming = all_gather(self.p, *col)

    def all_keys(self) -> Rows:
        """Return all rows of keys, by token."""
        return self.p.rows(self.p.sorted(self.k))

    def calls(self) -> Iterator[tuple[int | None, Rows, int | None, Rows]]:
        """Yield the operands of each kernel call as soon as they have arrived.

        By query, the first of this rank's own queries meet the keys of each owner as these arrive.
        Then the queries of each other owner, as they arrive, meet all keys in one call.  The rest
        of this rank's own queries comes last, while partial results travel.  By key, queries and
        keys exchange their roles.

        Yields
        ------
        q_owner : int or None
            Owner of the queries; None: all owners.
        queries : Rows
        k_owner : int or None
            Owner of the keys; None: all owners.
        keys : Rows
        """
        p, rank = self.p, self.p.rank
        if not p.group.overlap:
            for coming in (self.q_coming, self.k_coming):
                self.wait(coming)
        if self.by_query:
            first, *rest = split_own(p.group, rank, False, p.channels["col"], p.group.cols)
            own = p.rows(self.q, rank, first)
            yield rank, own, rank, p.rows(self.k, rank)
            for owner, keys in self._arriving(self.k_coming):
                yield rank, own, owner, keys
            for owner, queries in self._last(self.q_coming, self.own_k, self.own_q):
                yield owner, queries, None, self.all_keys()
            for part in rest:
                yield rank, p.rows(self.q, rank, part), None, self.all_keys()
        else:
            first, *rest = split_own(p.group, rank, True, p.channels["row"], p.group.rows)
            own = p.rows(self.k, rank, first)
            yield rank, p.rows(self.q, rank), rank, own
            for owner, queries in self._arriving(self.q_coming):
                yield owner, queries, rank, own
            for owner, keys in self._last(self.k_coming, self.own_q, self.own_k):
                yield None, p.rows(self.q), owner, keys
            for part in rest:
                yield None, p.rows(self.q), rank, p.rows(self.k, rank, part)

    def _arriving(self, coming: Incoming) -> Iterator[tuple[int, Rows]]:
        """Wait for each message in turn; yield its owner and rows."""
        for owner, message in coming:
            if self.p.group.overlap:
                self.wait([(owner, message)])
            yield owner, message.rows

    def _last(self, coming: Incoming, first: Rows, last: Rows) -> Iterator[tuple[int, Rows]]:
        """Wait for the messages of the last gather; yield their owners and rows.

        `first` are rows of the previous gather, and `last` rows of the last one.  A row of `first`
        may be larger than a row of `last` (by more than lse and delta).  Then the last messages
        arrive while other ranks still wait for messages of the previous gather.  In this case the
        rank waits until it has gathered everything.  It sends no partial result until all ranks of
        its row and column have gathered everything.
        """
        p = self.p
        larger, smaller = (sum(p.group.row_bytes(p.arrays[x.array])) for x in (first, last))
        if not p.group.uneven or larger < 1.1 * smaller:
            yield from self._arriving(coming)
            return
        if p.group.overlap:
            self.wait(coming)
        p.gathered("row", "col")
        yield from ((owner, message.rows) for owner, message in coming)

    def wait(self, coming: Incoming) -> None:
        """Wait for messages that bring rows."""
        self.p.wait(message for _, message in coming)


def forward(p: Program) -> None:
    """Write the forward pass of a rank."""
    tile = Tile(p, "q", by_query=True)  # q: (C n, H, D); k, v: (R n, Hkv, D)
    out = p.own("out", "out", "result")  # (n, H, D), and lse (n, H)
    partials = Partials(p, "row", "out", tile.row_peers, tile.required_queries)
    for owner, queries, _, keys in tile.calls():
        if owner == p.rank:
            p.attend(queries, keys, p.matching(out.array, queries))
        else:
            partial = partials.of(owner, queries)
            p.attend(queries, keys, partial)
            partials.give(owner, partial)
    partials.combine(out.array)
    p.results = {"out": out}


def backward(p: Program) -> None:
    """Write the backward pass of a rank."""
    group = p.group
    by_query = gradients_by_query(group)
    # dout, q: (C n, H, D); lse, delta: (C n, H); k, v: (R n, Hkv, D)
    tile = Tile(p, "qd", by_query)
    dq = p.sums("dq", "dq", tile.q)  # (C n, H, D)
    dkv = p.sums("dkv", "dkv", tile.k, by_token=by_query)  # dk, dv: (R n, Hkv, D)
    dq_partials = Partials(p, "row", "dq", tile.row_peers, tile.required_queries)
    dkv_partials = Partials(p, "col", "dkv", tile.col_peers, tile.required_keys)
    for q_owner, queries, k_owner, keys in tile.calls():
        into, keys_into = dq(queries), dkv(keys)
        p.differentiate(queries, keys, into, keys_into)
        # A result is finished if its queries have met all keys, or its keys all queries.
        if k_owner is None and q_owner != p.rank:
            dq_partials.give(q_owner, into)
        elif q_owner is None and k_owner != p.rank:
            dkv_partials.give(k_owner, keys_into)
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


def gradients_by_query(group: Group) -> bool:
    """Return True if a grid finishes its partial dq one by one, and dk and dv at the end.

    The larger of the two reductions of the backward pass is finished block by block: its results
    travel while later blocks are computed.  The smaller reduction is left for the end.
    """
    of_keys = (group.rows - 1) * group.elements("dk", "dv")
    return (group.cols - 1) * group.elements("dq") >= of_keys


def _known_as(layout: Layout) -> str:
    if layout.size == 1:
        return ""
    if layout.positions == 1:
        return "Ulysses"
    return "tree" if layout.rows == 1 else "all-gather" if layout.cols == 1 else ""


METHOD = Method(
    forward,
    backward,
    lambda layout: (layout.rows, layout.cols, ""),
    known_as=_known_as,
    roundings=lambda layout, kind: int((layout.rows if kind == "dkv" else layout.cols) > 1),
)
