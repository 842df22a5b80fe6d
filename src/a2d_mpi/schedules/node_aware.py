"""Attention2D on nodes of several ranks: what crosses the network, crosses it once per node.

The tiles are those of `a2d_mpi.schedules.attention2d`.  But where a row or a column spans several
nodes with several ranks each, one rank of a node fetches a chunk from another node and passes it
on to the others, and the partial results of a node for an owner elsewhere are summed by the rank
that fetched the owner's rows, before they leave.  The ranks of a node share this work evenly.
Rows travel as far as the mask makes somebody need them (`a2d_mpi.schedules.lines`).

Messages between nodes go through the channels "row" and "col", those inside a node through "row
node" and "col node".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from a2d_mpi.core.meetings import Others, Ranks
from a2d_mpi.core.sizes import Layout, UnlikeRanks
from a2d_mpi.schedules.attention2d import Tile, gradients_by_query
from a2d_mpi.schedules.lines import Line, equal_share
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import identity
from a2d_mpi.schedules.steps import KINDS, WIDE, Attend, Copy, Merge, Message, Rows, Zero


class NodeTile(Tile):
    """A tile whose rows and columns know their nodes."""

    def __init__(self, s: Schedule, by_query: bool) -> None:
        super().__init__(s)
        self.row, self.col, self._by_query = Line(s, "row"), Line(s, "col"), by_query

    def gather(self, kind: str) -> None:
        s, lines = self.s, (self.row, self.col)
        self.q = self.row.receive(kind, s.array(f"own {kind}", kind, (s.rank,), "given"))
        self.k = self.col.receive("kv", s.array("own kv", "kv", (s.rank,), "given"))
        for line in lines:
            line.send(line.name)
        for line in lines:
            line.send(line.inside)
            line.keep()
        # Partial results for other nodes have the longest way: they are computed first.
        self.q_coming = self.row.coming(far_first=self._by_query)
        self.k_coming = self.col.coming(far_first=not self._by_query)

    def wait(self, messages: Sequence[Message]) -> None:
        for message in messages:
            of_row = message.channel in (self.row.name, self.row.inside)
            line, other = (self.row, self.col) if of_row else (self.col, self.row)
            if node := line.node_of(message):
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
        That has those of all owners; default: an array for each owner.
    """

    def __init__(self, line: Line, kind: str, array: str | None = None) -> None:
        self.line, self.kind, self._array = line, kind, array
        # What is to be added to an owner's rows: by this node's members to those of other nodes,
        # by all others to this rank's.
        self._parts: dict[int | float, list[tuple[list[Message], Others]]] = {}
        self._held: dict[int, list[Rows]] = {}  # by node of the owner
        for d, node in enumerate(line.far, 1):
            for n, (p, distance) in enumerate(node):
                for e, member in enumerate(line.near if distance == 0 else (), 1):
                    name = f"{d}.{n} from node {e}"
                    self._receive(name, line.inside, member, p, line.needs(member))
        for e, p in enumerate(line.near, 1):
            self._receive(f"from node {e}", line.inside, p, line.s.rank, line.needs(p))
        for d, p in enumerate(line.takers, 1):
            self._receive(f"from {d}", line.name, p, line.s.rank, line.needed_in(d))

    def _receive(self, name: str, channel: str, peer: Ranks, owner: Ranks, others: Others) -> None:
        s, line = self.line.s, self.line
        array = s.array(f"{line.name} {self.kind} {name}", self.kind, meets=others)
        chunks = line.chunks(owner, others)
        if messages := [s.receive(channel, peer, Rows(array, owner, x)) for x in chunks]:
            self._parts.setdefault(identity(owner), []).append((messages, others))

    def partial(self, rows: Rows) -> Rows:
        """Rows for the partial result for some of an owner's rows."""
        if self._array:
            return rows._replace(array=self._array)
        node, distance = self.line.ways[identity(rows.owner)]
        summed = bool(node and not distance and self.line.near)
        # A rank's own sums are as wide as they are computed.
        name = self._name("sum" if summed else "to", rows.owner)
        wide, meets = KINDS[self.kind] if summed else WIDE, self.line.held(rows.owner)
        return rows._replace(array=self.line.s.array(name, self.kind, wide=wide, meets=meets))

    def give(self, rows: Rows) -> None:
        """Send a finished partial result on its way."""
        line, s = self.line, self.line.s
        node, distance = line.ways[identity(rows.owner)]
        if not node:
            s.give(line.inside, rows.owner, rows)
        elif distance:
            s.give(line.inside, line.near[distance - 1], rows)
        else:
            self._held.setdefault(node, []).append(rows)
        if s.sizes.overlap:  # the members of this node have sent theirs for the nodes before
            self._leave(apart=node if line.near else None)

    def all_others(self) -> list[Rows]:
        """Rows of all others, those of the other nodes first, in the chunks in which they go."""
        line = self.line
        owners = [*(p for node in line.far for p, _ in node), *line.near]
        return [Rows(self._array, p, x) for p in owners for x in line.chunks(p, line.held(p))]

    def finish(self, own: Rows) -> None:
        """Send what is left, and add the others' partial results to this rank's own rows."""
        line, s = self.line, self.line.s
        s.release(line.inside)
        self._leave()
        s.release(line.name)
        self._add(own)

    def _leave(self, apart: int | None = None) -> None:
        """Add what this node's members have for the other nodes, but one, and send the sums."""
        s = self.line.s
        nodes = sorted(self._held.keys() - {apart})
        for rows in [x for node in nodes for x in self._held.pop(node)]:
            self._add(rows)
            wide = s.arrays[rows.array].wide != WIDE
            if wide and s.sizes.narrow:
                name = self._name("rounded", rows.owner)
                meets = self.line.held(rows.owner)
                rounded = rows._replace(array=s.array(name, self.kind, meets=meets))
                s.add(Copy(rows, rounded))
                rows = rounded
            s.give(self.line.name, rows.owner, rows)

    def _add(self, rows: Rows) -> None:
        """Add the others' partial results to all rows of an owner, where they have some."""
        s = self.line.s
        for messages, others in self._parts.get(identity(rows.owner), ()):
            s.wait(messages)
            part = messages[0].rows._replace(part=None)
            s.add(Merge(part, rows._replace(part=s.chosen(others))))

    def _name(self, what: str, owner: Ranks) -> str:
        return f"{self.line.name} {self.kind} {what} {self.line.numbers[identity(owner)]}"


def forward(s: Schedule) -> None:
    """Write down the forward pass of rank ``s.rank``."""
    tile = NodeTile(s, by_query=True)
    tile.gather("q")
    out = s.array("out", "out", (s.rank,), "result")
    sums = Sums(tile.row, "out")
    for queries, keys in tile.blocks(by_query=True):
        if queries.owner is s.rank:
            s.add(Attend(queries, keys, Rows(out, s.rank, queries.part)))
        else:
            s.add(Attend(queries, keys, partial := sums.partial(queries)))
            sums.give(partial)
    sums.finish(Rows(out, s.rank))
    s.results = {"out": Rows(out, s.rank)}


def backward(s: Schedule) -> None:
    """Write down the backward pass of rank ``s.rank``."""
    sizes = s.sizes
    by_query = gradients_by_query(sizes.rows, sizes.cols, sizes.nheads, sizes.nheads_kv)
    tile = NodeTile(s, by_query)
    tile.gather("qd")
    dq, dkv = tile.row.array("dq", "dq"), tile.col.array("dkv", "dkv")
    s.add(Zero(Rows(dq)), Zero(Rows(dkv)))
    of_q, of_k = Sums(tile.row, "dq", dq), Sums(tile.col, "dkv", dkv)
    for queries, keys in tile.blocks(by_query):
        into, keys_into = of_q.partial(queries), of_k.partial(keys)
        s.add(Attend(queries, keys, into, keys_into))
        # Finished: these queries have met all keys, or these keys all queries.
        if keys.owner is None and queries.owner is not s.rank:
            of_q.give(into)
        elif queries.owner is None and keys.owner is not s.rank:
            of_k.give(keys_into)
    late = of_k if by_query else of_q
    for rows in late.all_others():
        late.give(rows)
    for sums, array in ((of_q, dq), (of_k, dkv)):
        sums.finish(Rows(array, s.rank))
    s.results = {"dq": Rows(dq, s.rank), "dkv": Rows(dkv, s.rank)}


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
)
