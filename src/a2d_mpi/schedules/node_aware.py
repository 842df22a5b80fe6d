"""Attention2D on nodes of several ranks: rows enter a node once, and results leave it as a sum.

Tiles are the same as in `a2d_mpi.schedules.attention2d`.  A row or column of the grid may span
several nodes with several ranks each.  Then one rank of a node fetches the rows of an owner on
another node, and passes them on to the other ranks of its node.  The same rank sums the partial
results of its node for this owner before they leave.  The ranks of a node share this work evenly.
Only required rows travel (`a2d_mpi.schedules.lines`).

Messages between nodes use the channels "row" and "col".  Messages inside a node use "row node" and
"col node".
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.core.sizes import Layout, UnlikeRanks
from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.attention2d import Tile, gradients_by_query
from a2d_mpi.schedules.collectives import Incoming
from a2d_mpi.schedules.lines import NodeLine, equal_share
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS, SUMS, Receive, Rows


class NodeTile(Tile):
    """A tile that gathers node by node."""

    def gather(self) -> None:
        """Gather the rows of queries along the row, and the rows of keys along the column."""
        self.row = NodeLine(self.p, "row", self.own_q.array)
        self.col = NodeLine(self.p, "col", self.own_k.array)
        lines = self.row, self.col
        for line in lines:
            line.post()
        for line in lines:
            line.send(line.name)
        for line in lines:
            line.send(line.inside)
            line.keep()
        self.q, self.k = self.row.gathered, self.col.gathered
        # Partial results for other nodes travel farthest, so they are computed first.
        self.q_coming = self.row.coming(far_first=self.by_query)
        self.k_coming = self.col.coming(far_first=not self.by_query)

    def wait(self, coming: Incoming) -> None:
        """Wait for messages that bring rows, and pass on rows of other nodes."""
        for owner, message in coming:
            of_row = message.channel in (self.row.name, self.row.inside)
            line, other = (self.row, self.col) if of_row else (self.col, self.row)
            if node := line.ways[owner][0]:
                line.pass_on(node)
                # The other line's rows from about as many nodes have arrived by now.
                if other.near:
                    other.pass_on((node - 1) * len(other.far) // len(line.far))
            line.wait([message])


class Sums:
    """Partial results that travel along a line to their owners and are summed node by node.

    Parameters
    ----------
    line : NodeLine
    kind : {"out", "dq", "dkv"}
    array : str, optional
        Array that holds the partial results for all owners.  Default: an array for each owner.
    """

    def __init__(self, line: NodeLine, kind: str, array: str | None = None) -> None:
        self.line, self.kind, self._array, self.p = line, kind, array, line.p
        # Contributions that this rank receives, by the owner of the rows.  For owners on other
        # nodes they come from ranks of this node.  For this rank's rows they come from all ranks.
        self._received: dict[int, list[tuple[list[Receive], str]]] = {}
        self._held: dict[int, list[tuple[int, Rows]]] = {}  # by node of the owner
        me = self.p.rank
        for d, node in enumerate(line.far, 1):
            for n, (owner, distance) in enumerate(node):
                for e, member in enumerate(line.near if distance == 0 else (), 1):
                    places = line.required(owner, member)
                    self._receive(f"{d}.{n} from node {e}", line.inside, member, owner, places)
        for e, peer in enumerate(line.near, 1):
            self._receive(f"from node {e}", line.inside, peer, me, line.required(me, peer))
        for d, peer in enumerate(line.takers, 1):
            self._receive(f"from {d}", line.name, peer, me, line.required_in(me, d))

    def _receive(self, name: str, channel: str, peer: int, owner: int, places: Runs) -> None:
        p, line = self.p, self.line
        array = p.array(f"{line.name} {self.kind} {name}", self.kind, [(owner, places)])
        messages = [
            p.receive(channel, peer, p.rows(array, owner, chunk)) for chunk in line.chunks(places)
        ]
        if messages:
            self._received.setdefault(owner, []).append((messages, array))

    def partial(self, owner: int, queries: Rows) -> Rows:
        """Declare rows for the partial result for queries of an owner."""
        line = self.line
        node, distance = line.ways[owner]
        summed = bool(node and not distance and line.near)
        # Sums that this rank adds to keep the accumulation dtype.
        name = f"{line.name} {self.kind} {'sum' if summed else 'to'} {owner}"
        accumulated = KINDS[self.kind] if summed else SUMS
        self.p.array(name, self.kind, [(owner, line.held(owner))], accumulated=accumulated)
        return self.p.matching(name, queries)

    def give(self, owner: int, rows: Rows) -> None:
        """Send a finished partial result to its owner, or to the rank that sums it."""
        line, p = self.line, self.p
        node, distance = line.ways[owner]
        if not node:
            p.give(line.inside, owner, rows)
        elif distance:
            p.give(line.inside, line.near[distance - 1], rows)
        else:
            self._held.setdefault(node, []).append((owner, rows))
        if p.group.overlap:  # ranks of this node have sent their results for earlier nodes
            self._leave(apart=node if line.near else None)

    def give_all(self) -> None:
        """Send the partial results for all other ranks, other nodes first, chunk by chunk."""
        line, p = self.line, self.p
        for owner in [*(x for node in line.far for x, _ in node), *line.near]:
            for chunk in line.chunks(line.held(owner)):
                self.give(owner, p.rows(self._array, owner, chunk))

    def finish(self, target: str) -> None:
        """Send the remaining results; add other ranks' partial results to this rank's rows."""
        line, p = self.line, self.p
        p.release(line.inside)
        self._leave()
        p.release(line.name)
        self._add(p.rank, p.rows(target, p.rank))

    def _leave(self, apart: int | None = None) -> None:
        """Sum this node's results for other nodes and send the sums, except for node `apart`."""
        p = self.p
        nodes = sorted(self._held.keys() - {apart})
        for owner, rows in [x for node in nodes for x in self._held.pop(node)]:
            self._add(owner, rows)
            p.give(self.line.name, owner, rows)

    def _add(self, owner: int, rows: Rows) -> None:
        """Add other ranks' partial results for an owner to `rows`, if there are any."""
        p = self.p
        for messages, array in self._received.get(owner, ()):
            p.wait(messages)
            partial = p.rows(array)
            p.combine(partial, p.matching(rows.array, partial))


def forward(p: Program) -> None:
    """Write the forward pass of a rank."""
    tile = NodeTile(p, "q", by_query=True)
    out = p.own("out", "out", "result")
    sums = Sums(tile.row, "out")
    for owner, queries, _, keys in tile.calls():
        if owner == p.rank:
            p.attend(queries, keys, p.matching(out.array, queries))
        else:
            partial = sums.partial(owner, queries)
            p.attend(queries, keys, partial)
            sums.give(owner, partial)
    sums.finish(out.array)
    p.results = {"out": out}


def backward(p: Program) -> None:
    """Write the backward pass of a rank."""
    group = p.group
    by_query = gradients_by_query(group)
    tile = NodeTile(p, "qd", by_query)
    dq = p.sums("dq", "dq", tile.q)
    dkv = p.sums("dkv", "dkv", tile.k, by_token=by_query)
    of_q, of_k = Sums(tile.row, "dq", "dq"), Sums(tile.col, "dkv", "dkv")
    for q_owner, queries, k_owner, keys in tile.calls():
        into, keys_into = dq(queries), dkv(keys)
        p.differentiate(queries, keys, into, keys_into)
        # A result is finished if its queries have met all keys, or its keys all queries.
        if k_owner is None and q_owner != p.rank:
            of_q.give(q_owner, into)
        elif q_owner is None and k_owner != p.rank:
            of_k.give(k_owner, keys_into)
    (of_k if by_query else of_q).give_all()
    of_q.finish("dq")
    of_k.finish("dkv")
    p.results = {"dq": p.rows("dq", p.rank), "dkv": p.rows("dkv", p.rank)}


def _suits(layout: Layout) -> bool:
    """Return True if nodes divide all rows, and all columns, into equal groups of several ranks.

    Rows or columns, not both, may lie inside nodes or have one rank per node.
    """
    try:
        nodes = layout.nodes_of_group()
    except UnlikeRanks:
        return False
    if nodes is None:
        return False
    grid = np.reshape(nodes, (layout.rows, layout.cols))
    shares = equal_share(grid), equal_share(grid.T)
    return min(shares) > 0 and any(
        1 < b < ranks for b, ranks in zip(shares, (layout.cols, layout.rows))
    )


METHOD = Method(
    forward,
    backward,
    lambda layout: (layout.rows, layout.cols, ""),
    suits=_suits,
    knows_nodes=True,
    roundings=lambda layout, kind: 2,
)
