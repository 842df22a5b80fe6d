"""Attention2D on nodes of several ranks: what crosses the network, crosses it once per node.

The tiles are those of `a2d_mpi.schedules.attention2d`.  But where a row or a column spans several
nodes with several ranks each, one rank of a node fetches a chunk from another node and passes it
on to the others, and the partial results of a node for an owner elsewhere are summed by the rank
that fetched the owner's rows, before they leave.  The ranks of a node share this work evenly.

Messages between nodes go through the channels "row" and "col", those inside a node through "row
node" and "col node".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from a2d_mpi.core.sizes import Layout, UnlikeRanks
from a2d_mpi.schedules.attention2d import Tile, gradients_by_query
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.steps import (
    KINDS,
    WIDE,
    Attend,
    Copy,
    Merge,
    Message,
    Ranks,
    Rows,
    Schedule,
    Zero,
    identity,
)


class Line:
    """A row or column, by node, as one of its ranks sees it, and its all-gather.

    Parameters
    ----------
    s : Schedule
    name : {"row", "col"}
        Of its channel between nodes.

    Attributes
    ----------
    inside : str
        Channel inside a node.
    near : list of Ranks
        The other ranks of this rank's node, next first.
    far : list of list of (Ranks, int)
        The ranks of every other node, next node first, each with the distance of the member of
        this rank's node that fetches its rows: `near` from 1; 0, this rank itself, comes last.
    takers : list of Ranks
        The rank of every other node that fetches this rank's rows.
    """

    def __init__(self, s: Schedule, name: str) -> None:
        self.s, self.name, self.inside = s, name, f"{name} node"
        (own, *self.far), self.takers = _by_node(s, name)
        self.near = [p for p, distance in own if distance]
        self.ways = {identity(p): (d, e) for d, x in enumerate((own, *self.far)) for p, e in x}
        self.numbers = {key: n for n, key in enumerate(self.ways)}
        self.ranks = len(self.ways)
        if self.near:
            s.channels[self.inside] = s.channels[name]
        self._passed = 0 if self.near else len(self.far)  # nodes whose chunks were passed on
        self._here: set[Message] = set()

    def receive(self, kind: str, own: str) -> str:
        """Post the receives of everyone's rows of an array; returns the array of all of them."""
        s = self.s
        self._own = own
        self._whole = whole = own if self.ranks == 1 else s.array(self.name, kind, self.members)
        self._fetched = [
            [self._from(self.name, p, p) for p, e in node if not e] for node in self.far
        ]
        self._near = [self._from(self.inside, p, p) for p in self.near]
        self._passed_on = [
            [self._from(self.inside, self.near[e - 1], p) for p, e in node if e]
            for node in self.far
        ]
        return whole

    @property
    def members(self) -> tuple[Ranks, ...]:
        """All its ranks, in the order of the channel."""
        return self.s.channels[self.name]

    def _from(self, channel: str, peer: Ranks, owner: Ranks) -> list[Message]:
        chunks = self.s.sizes.chunks(owner, self.ranks)
        return [self.s.receive(channel, peer, Rows(self._whole, owner, x)) for x in chunks]

    def coming(self, far_first: bool) -> dict[int, list[Message]]:
        """Messages that bring the others' rows, in the order of their use."""
        far: list[list[Message]] = []
        for fetched, passed_on in zip(self._fetched, self._passed_on):
            # What this rank fetched is here first; what it sums for its node may be done last.
            far += passed_on + fetched if far_first else fetched + passed_on
        return dict(enumerate(far + self._near if far_first else self._near + far))

    def send(self, channel: str) -> None:
        """Send this rank's rows to the others of its node, or to those that fetch them."""
        # They are the first that the rank before this one needs, and the last of the next.
        for p in reversed(self.takers if channel == self.name else self.near):
            for x in self.s.sizes.chunks(self.s.rank, self.ranks):
                self.s.send(channel, p, Rows(self._own, self.s.rank, x))

    def keep(self) -> None:
        """Put this rank's rows beside those of the others."""
        if self.ranks > 1:
            own = Rows(self._own, self.s.rank)
            self.s.add(Copy(own, own._replace(array=self._whole)))

    def node_of(self, message: Message) -> int:
        """Of the owner of the rows that come: 0, this rank's own; others from 1."""
        return self.ways[identity(message.rows.owner)][0]

    def pass_on(self, nodes: int) -> None:
        """Pass the chunks of so many other nodes on, when they are here."""
        for fetched in self._fetched[self._passed : nodes]:
            for message in chain.from_iterable(fetched):
                self.s.wait([message])
                self._here.add(message)
                for p in reversed(self.near):
                    self.s.send(self.inside, p, message.rows)
        self._passed = max(self._passed, nodes)

    def wait(self, messages: Sequence[Message]) -> None:
        """Wait for messages; what this rank fetched was waited for when it was passed on."""
        self.s.wait([m for m in messages if m not in self._here])


def _by_node(s: Schedule, name: str) -> tuple[list[list[tuple[Ranks, int]]], list[Ranks]]:
    """The ranks of a row or column by node, this rank's own first, and `Line.takers`.

    With each rank the distance, in this rank's node, of the member that fetches its rows: place k
    is fetched by place k mod b of b members.
    """
    cols = s.sizes.cols
    grid = np.arange(s.sizes.rows * cols).reshape(-1, cols)
    at, line = s.rank % cols, s.rank // cols
    if name == "col":
        grid, at, line = grid.T, line, at
    node = grid if s.sizes.nodes is None else np.array(s.sizes.nodes)[grid]
    if np.ndim(s.rank):
        return _by_equal_node(grid, node, line, at)
    own, groups = int(node[line, at]), {}
    for p, x in zip(grid[line].tolist(), node[line].tolist()):
        groups.setdefault(x, []).append(s.rank if p == s.rank else p)
    names = sorted(groups)
    names = names[names.index(own) :] + names[: names.index(own)]
    b, i = len(groups[own]), groups[own].index(s.rank)
    found = [
        sorted(((p, (k - i) % b) for k, p in enumerate(groups[x])), key=lambda x: x[1] or b)
        for x in names
    ]
    return found, [groups[x][i % len(groups[x])] for x in names[1:]]


def _by_equal_node(
    grid: np.ndarray, node: np.ndarray, line: np.ndarray, at: np.ndarray
) -> tuple[list[list[tuple[Ranks, int]]], list[Ranks]]:
    """The same of all ranks at once, which see the same numbers of ranks and nodes."""
    if not (b := equal_share(node)):
        raise UnlikeRanks("the nodes do not divide all rows and columns of the grid alike")
    order = np.argsort(node, axis=1, kind="stable")
    table = np.take_along_axis(grid, order, axis=1).reshape(len(grid), -1, b)
    j, i = np.divmod(np.argsort(order, axis=1)[line, at], b)
    nodes = range(table.shape[1])
    found = [
        [(table[line, (j + d) % len(nodes), (i + e) % b], e) for e in (*range(1, b), 0)]
        for d in nodes
    ]
    return found, [x[-1][0] for x in found[1:]]


def equal_share(node: np.ndarray) -> int:
    """Ranks of a line in each node of it, if that is the same everywhere, else 0.

    `node`: (lines, ranks of a line), the node of every rank.
    """
    sort = np.sort(node, axis=1)
    b = int(np.sum(sort[0] == sort[0, 0]))
    if sort.shape[1] % b:
        return 0
    parts = sort.reshape(len(sort), -1, b)
    alike = (parts == parts[:, :, :1]).all() and (parts[:, 1:, 0] != parts[:, :-1, 0]).all()
    return b * bool(alike)


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
        self._parts: dict[tuple, list[Message]] = {}  # of this node's members, for other nodes
        self._held: dict[int, list[Rows]] = {}  # by node of the owner
        for d, node in enumerate(line.far, 1):
            for n, (p, distance) in enumerate(node):
                for e, member in enumerate(line.near if distance == 0 else (), 1):
                    for m in self._receive(f"{d}.{n} from node {e}", line.inside, member, p):
                        self._parts.setdefault((identity(p), m.rows.part), []).append(m)
        own = line.s.rank
        self._own = [
            *(
                self._receive(f"from node {e}", line.inside, p, own)
                for e, p in enumerate(line.near, 1)
            ),
            *(self._receive(f"from {d}", line.name, p, own) for d, p in enumerate(line.takers, 1)),
        ]

    def _receive(self, name: str, channel: str, peer: Ranks, owner: Ranks) -> list[Message]:
        line = self.line
        array = line.s.array(f"{line.name} {self.kind} {name}", self.kind)
        chunks = line.s.sizes.chunks(owner, line.ranks)
        return [line.s.receive(channel, peer, Rows(array, owner, x)) for x in chunks]

    def partial(self, rows: Rows) -> Rows:
        """Rows for the partial result for some of an owner's rows."""
        if self._array:
            return rows._replace(array=self._array)
        node, distance = self.line.ways[identity(rows.owner)]
        summed = bool(node and not distance and self.line.near)
        # A rank's own sums are as wide as they are computed.
        name = self._name("sum" if summed else "to", rows.owner)
        wide = KINDS[self.kind] if summed else WIDE
        return rows._replace(array=self.line.s.array(name, self.kind, wide=wide))

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
        return [
            Rows(self._array, p, x) for p in owners for x in line.s.sizes.chunks(p, line.ranks)
        ]

    def finish(self, own: Rows) -> None:
        """Send what is left, and add the others' partial results to this rank's own rows."""
        line, s = self.line, self.line.s
        s.release(line.inside)
        self._leave()
        s.release(line.name)
        for messages in self._own:
            s.wait(messages)
            s.add(Merge(messages[0].rows._replace(part=None), own))

    def _leave(self, apart: int | None = None) -> None:
        """Add what this node's members have for the other nodes, but one, and send the sums."""
        s = self.line.s
        for rows in [x for node in self._held.keys() - {apart} for x in self._held.pop(node)]:
            for message in self._parts.get((identity(rows.owner), rows.part), ()):
                s.wait([message])
                s.add(Merge(message.rows, rows))
            wide = s.arrays[rows.array].wide != WIDE
            if wide and s.sizes.narrow:
                name = self._name("rounded", rows.owner)
                rounded = rows._replace(array=s.array(name, self.kind))
                s.add(Copy(rows, rounded))
                rows = rounded
            s.give(self.line.name, rows.owner, rows)

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
    dq = s.array("dq", "dq", s.channels["row"])
    dkv = s.array("dkv", "dkv", s.channels["col"])
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
    """Whether a row or column has nodes of several ranks, and all are cut by nodes alike."""
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
