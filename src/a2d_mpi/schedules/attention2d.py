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

from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.line import Line, arrivals
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Rows
from a2d_mpi.schedules.trees import in_equal_nodes


def forward(p: Program) -> None:
    """Gather queries along the row and keys along the column; return results along the row."""
    out = p.own("out", "out", "result")  # (n, H, D), and lse (n, H)
    # Post the receives of others' rows, and send this rank's own ones; the rows arrive below.
    row, col = (x.start() for x in (Line.of_row(p, "q"), Line.of_column(p)))
    # q: (C n, H, D); k, v: (R n, Hkv, D)
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

    The larger of dq, and dk with dv, is finished owner by owner, and travels while later ones are
    computed.  Its rows are the `late` ones: they are waited for after the `early` ones.  Gradients
    of the early rows are sums over all that follows, and leave at the end.
    """
    # dout, q: (C n, H, D); lse, delta: (C n, H); k, v: (R n, Hkv, D)
    row, col = (x.start() for x in (Line.of_row(p, "qd"), Line.of_column(p)))
    sums = {row: p.zeros("dq", "dq", row.array), col: p.zeros("dkv", "dkv", col.array)}
    early, late = (col, row) if dq_is_larger(p.group) else (row, col)

    def differentiate(early_rows: Rows, late_rows: Rows) -> None:
        q, kv = (late_rows, early_rows) if late is row else (early_rows, late_rows)
        p.differentiate(q, kv, q.of(sums[row]), kv.of(sums[col]))

    own = p.rows(late.array, p.rank)
    differentiate(p.rows(early.array, p.rank), own)
    for line, owner, rows in arrivals(early, late):
        if line is early:
            differentiate(rows, own)
        else:
            differentiate(p.rows(early.array), rows)
            late.give(owner, rows.of(sums[late]))
    late.send_held_back()  # nothing on a plain grid
    early.give_all(sums[early])
    early.send_held_back()
    for line in (row, col):
        line.finish(sums[line])
    p.results = {"dq": p.rows("dq", p.rank), "dkv": p.rows("dkv", p.rank)}


def dq_is_larger(group: Group) -> bool:
    """Return whether a rank sends at least as many elements of partial dq as of dk and dv."""
    of_keys = (group.rows - 1) * group.elements("dk", "dv")
    return (group.cols - 1) * group.elements("dq") >= of_keys


METHOD = Method(forward, backward)
NODE_AWARE = METHOD._replace(suits=in_equal_nodes, knows_nodes=True)
