"""Attention2D on nodes of several ranks: what crosses the network, crosses it once per node.

The tiles are those of `a2d_mpi.schedules.attention2d`.  But where a row or a column spans several
nodes with several ranks each, one rank of a node fetches a chunk from another node and passes it
on to the others, and the partial results of a node for an owner elsewhere are summed by the rank
that fetched the owner's rows, before they leave.  The ranks of a node share this work evenly.
Rows travel only where a rank requires them (`a2d_mpi.schedules.lines`).

Messages between nodes go through the channels "row" and "col", those inside a node through "row
node" and "col node".
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.core.sizes import Layout, UnlikeRanks
from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.attention2d import Tile, gradients_by_query
from a2d_mpi.schedules.collectives import Coming
from a2d_mpi.schedules.lines import Line, equal_share
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS, SUMS, Receive, Rows


class NodeTile(Tile):
    """A tile whose rows and columns know their nodes."""

    def gather(self) -> None:
        """Gather the rows of queries along the row, and the rows of keys along the column."""
        self.row = Line(self.p, "row", self.own_q.array)
        self.col = Line(self.p, "col", self.own_k.array)
        lines = self.row, self.col
        for line in lines:
            line.post()
        for line in lines:
            line.send(line.name)
        for line in lines:
            line.send(line.inside)
            line.keep()
        self.q, self.k = self.row.gathered, self.col.gathered
        # Partial results for other nodes have the longest way: they are computed first.
        self.q_coming = self.row.coming(far_first=self.by_query)
        self.k_coming = self.col.coming(far_first=not self.by_query)

    def wait(self, coming: Coming) -> None:
        """Wait for messages that bring rows, and pass on what came from other nodes."""
        for owner, message in coming:
            of_row = message.channel in (self.row.name, self.row.inside)
            line, other = (self.row, self.col) if of_row else (self.col, self.row)
            if node := line.ways[owner][0]:
                line.pass_on(node)
                # What the other line fetched has come as far, about.
                if other.near:
                    other.pass_on((node - 1) * len(other.far) // len(line.far))
            line.wait([message])


class Sums:
    """Partial results along a line on their way to their owners, summed node by node.

    Parameters
    ----------
    line : Line
    kind : str
    array : str, optional
        That holds the partial results for all owners; default: an array for each owner.
    """

    def __init__(self, line: Line, kind: str, array: str | None = None) -> None:
        self.line, self.kind, self._array, self.p = line, kind, array, line.p
        # What is to be added to an owner's rows: by this node's members to the rows of other
        # nodes, by all others to this rank's.
        self._parts: dict[int, list[tuple[list[Receive], str]]] = {}
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
            self._parts.setdefault(owner, []).append((messages, array))

    def partial(self, owner: int, queries: Rows) -> Rows:
        """Declare rows for the partial result for some of an owner's queries."""
        line = self.line
        node, distance = line.ways[owner]
        summed = bool(node and not distance and line.near)
        # A rank's own sums are as wide as they are computed.
        name = f"{line.name} {self.kind} {'sum' if summed else 'to'} {owner}"
        accumulated = KINDS[self.kind] if summed else SUMS
        self.p.array(name, self.kind, [(owner, line.held(owner))], accumulated=accumulated)
        return self.p.matching(name, queries)

    def give(self, owner: int, rows: Rows) -> None:
        """Send a finished partial result on its way."""
        line, p = self.line, self.p
        node, distance = line.ways[owner]
        if not node:
            p.give(line.inside, owner, rows)
        elif distance:
            p.give(line.inside, line.near[distance - 1], rows)
        else:
            self._held.setdefault(node, []).append((owner, rows))
        if p.group.overlap:  # the members of this node have sent theirs for the nodes before
            self._leave(apart=node if line.near else None)

    def give_all(self) -> None:
        """Send the partial results for all others, other nodes first, chunk by chunk."""
        line, p = self.line, self.p
        for owner in [*(x for node in line.far for x, _ in node), *line.near]:
            for chunk in line.chunks(line.held(owner)):
                self.give(owner, p.rows(self._array, owner, chunk))

    def finish(self, target: str) -> None:
        """Send what is left, and add the others' partial results to this rank's own rows."""
        line, p = self.line, self.p
        p.release(line.inside)
        self._leave()
        p.release(line.name)
        self._add(p.rank, p.rows(target, p.rank))

    def _leave(self, apart: int | None = None) -> None:
        """Add what this node's members have for the other nodes, but one, and send the sums."""
        p = self.p
        nodes = sorted(self._held.keys() - {apart})
        for owner, rows in [x for node in nodes for x in self._held.pop(node)]:
            self._add(owner, rows)
            array = p.arrays[rows.array]
            if array.accumulated != SUMS and p.group.mixed_precision:
                name = p.array(f"rounded {rows.array}", self.kind, array.pieces)
                p.copy(rows, rows._replace(array=name))
                rows = rows._replace(array=name)
            p.give(self.line.name, owner, rows)

    def _add(self, owner: int, rows: Rows) -> None:
        """Add the others' partial results to an owner's rows, where they have some."""
        p = self.p
        for messages, array in self._parts.get(owner, ()):
            p.wait(messages)
            part = p.rows(array)
            p.combine(part, p.matching(rows.array, part))


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
        # Finished: these queries have met all keys, or these keys all queries.
        if k_owner is None and q_owner != p.rank:
            of_q.give(q_owner, into)
        elif q_owner is None and k_owner != p.rank:
            of_k.give(k_owner, keys_into)
    (of_k if by_query else of_q).give_all()
    of_q.finish("dq")
    of_k.finish("dkv")
    p.results = {"dq": p.rows("dq", p.rank), "dkv": p.rows("dkv", p.rank)}


def _suits(layout: Layout) -> bool:
    """Tell whether a row or column has nodes of several ranks, and all are cut by nodes alike."""
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
