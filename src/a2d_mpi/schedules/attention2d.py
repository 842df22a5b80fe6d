"""Attention2D: every rank of an R x C grid computes one tile.

Rank (r, c) computes the queries of grid row r against the keys of grid column c.  It gathers the
queries along its row and the keys along its column.  Each partial result goes to its owner.
Partial out and dq go to the owner of the queries, and partial dk and dv to the owner of the keys.
On square grids the bytes that a rank receives fall as 1/sqrt(P).

Source: Elango, "Attention2D: Communication Efficient Distributed Self-Attention Mechanism",
arXiv:2503.15758.  The order of the work is ours.  A rank computes on the rows that have arrived,
sends finished results at once, and waits only for the rows of the next call.

On nodes of several ranks, `NODE_AWARE` is the same method with other trees.  One rank of a node
fetches the rows of an owner on another node, and passes them on.  It also sums its node's results
before they leave.  So rows enter a node once.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import chain

from a2d_mpi.masks.intervals import Runs, cut, size
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.line import Line, arrivals, by_node, from_here
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Rows

GRAIN = 128  # tokens: a shard of at least 2 GRAIN tokens is cut at a multiple of GRAIN


def forward(p: Program) -> None:
    """Gather queries along the row and keys along the column; return results along the row."""
    out = p.own("out", "out", "result")  # (n, H, D), and lse (n, H)
    # Post every receive, and send this rank's own rows; the other rows arrive below.
    row, col = (x.start() for x in lines(p, "q"))  # q: (C n, H, D); k, v: (R n, Hkv, D)
    own = p.rows(row.array, p.rank)
    p.attend(own, p.rows(col.array, p.rank), out)
    for line, owner, rows in arrivals(col, row):
        if line is col:  # own queries meet the keys of each owner as these arrive
            p.attend_and_merge(own, rows, out)
        else:  # each chunk of others' queries meets all keys in one call
            result = row.result("out", owner, rows)
            p.attend(rows, p.rows(col.array), result)
            row.give(owner, result)
    row.finish("out")
    p.results = {"out": out}


def backward(p: Program) -> None:
    """Write the backward pass of a rank.

    Gradients of one side, the one with more bytes, are finished owner by owner, and travel while
    later ones are computed.  Its rows are the `late` ones to arrive.  Gradients of the `early`
    rows are sums over all that follows, and leave at the end.
    """
    by_query = gradients_by_query(p.group)
    # dout, q: (C n, H, D); lse, delta: (C n, H); k, v: (R n, Hkv, D)
    row, col = (x.start() for x in lines(p, "qd"))
    sums = {row: p.zeros("dq", "dq", row.array), col: p.zeros("dkv", "dkv", col.array)}
    early, late = (col, row) if by_query else (row, col)

    def differentiate(early_rows: Rows, late_rows: Rows) -> None:
        q, kv = (late_rows, early_rows) if by_query else (early_rows, late_rows)
        p.differentiate(q, kv, q.of(sums[row]), kv.of(sums[col]))

    own = p.rows(late.array, p.rank)
    differentiate(p.rows(early.array, p.rank), own)
    for line, owner, rows in arrivals(early, late):
        if line is early:
            differentiate(rows, own)
        else:
            differentiate(p.rows(early.array), rows)
            late.give(owner, rows.of(sums[late]))
    late.send_held_back()
    early.give_all(sums[early])
    early.send_held_back()
    for line in (row, col):
        line.finish(sums[line])
    p.results = {"dq": p.rows("dq", p.rank), "dkv": p.rows("dkv", p.rank)}


def lines(p: Program, kind: str) -> tuple[Line, Line]:
    """Make the row of a rank, with queries of this kind, and its column, with keys and values."""
    group = p.group
    nodes = group.nodes or range(group.rows * group.cols)

    def line(name: str, own: Rows, ranks: range) -> Line:
        of_keys, across = name == "col", group.row_of if name == "col" else group.column_of

        # A rank needs the queries that see any key of its column, and the keys that any query of
        # its row sees.
        def required(owner: int, members: Collection[int]) -> Runs:
            if len(members) == 1:
                return group.required(of_keys, owner, across(*members))
            return group.required(of_keys, owner, frozenset(chain(*map(across, members))))

        ordered = from_here(p.rank, ranks, nodes)
        near = [x for x in ordered[1:] if nodes[x] == nodes[p.rank]]
        trees = by_node(p.rank, ranks, nodes) if group.nodes else None
        chunks = partial(chunked, ranks=len(ranks))
        return Line(p, name, own.array, ordered, required, trees, near=near, chunks=chunks)

    return (
        line("row", p.own(f"own {kind}", kind, "given"), group.row_of(p.rank)),
        line("col", p.own("own kv", "kv", "given"), group.column_of(p.rank)),
    )


def chunked(places: Runs, ranks: int) -> list[Runs]:
    """Cut places into the chunks that travel along a row or column of `ranks` ranks.

    Among more than two ranks a shard is a small share of the traffic, and travels as one chunk.
    Between two ranks it is all of the traffic, and travels as two chunks.  With one chunk the
    receiver could compute nothing before the whole message arrives.  The sender of a result could
    send nothing before the whole result is computed.
    """
    n = size(places)
    if ranks == 2 and n >= 2 * GRAIN:
        middle = GRAIN * round(n / 2 / GRAIN)
        return [cut(places, 0, middle), cut(places, middle, n)]
    return [places] if n else []


def gradients_by_query(group: Group) -> bool:
    """Return True if dq is finished owner by owner, and dk and dv at the end: if dq is larger."""
    of_keys = (group.rows - 1) * group.elements("dk", "dv")
    return (group.cols - 1) * group.elements("dq") >= of_keys


METHOD = Method(forward, backward)
NODE_AWARE = METHOD._replace(suits=lambda layout: layout.in_equal_nodes, knows_nodes=True)
