"""Rows and columns of a grid, node by node: who fetches what, and the all-gather of their rows.

Of a shard those rows go to a node that any of its ranks needs, and from the rank that fetches them
to each of the others those that this one needs.  The fetcher computes on all that it holds: the
mask hides the rest from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from a2d_mpi.core.meetings import Others, Ranks
from a2d_mpi.core.sizes import UnlikeRanks
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import identity
from a2d_mpi.schedules.steps import Copy, Message, Rows


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

    Which rows a rank or a node needs, and holds, is said by the ranks on the other side of the
    tiles: the rows that meet theirs (`a2d_mpi.core.meetings`).
    """

    def __init__(self, s: Schedule, name: str) -> None:
        self.s, self.name, self.inside = s, name, f"{name} node"
        self.of_keys = name == "col"
        self._nodes, self.takers = _by_node(s, name)
        own, *self.far = self._nodes
        own[-1] = s.rank, 0  # the same numbers, and the same object
        self.near = [p for p, distance in own if distance]
        self.ways = {identity(p): (d, e) for d, x in enumerate((own, *self.far)) for p, e in x}
        self.numbers = {key: n for n, key in enumerate(self.ways)}
        self.ranks = len(self.ways)
        if self.near:
            s.channels[self.inside] = s.channels[name]
        self._across: dict[int, Others] = {}
        self._passed = 0 if self.near else len(self.far)  # nodes whose chunks were passed on
        self._here: set[Message] = set()

    def receive(self, kind: str, own: str) -> str:
        """Post the receives of everyone's rows of an array; returns the array of all of them."""
        self._own = own
        self._whole = whole = own if self.ranks == 1 else self.array(self.name, kind)
        self._fetched = [
            [(p, self._from(self.name, p, p)) for p, e in node if not e] for node in self.far
        ]
        self._near = [self._from(self.inside, p, p) for p in self.near]
        self._passed_on = [
            [self._from(self.inside, self.near[e - 1], p) for p, e in node if e]
            for node in self.far
        ]
        return whole

    def array(self, name: str, kind: str) -> str:
        """Declare an array of this rank's rows and those that it holds of the others."""
        owners = [p for p, _ in chain(*self._nodes)]
        if not np.ndim(self.s.rank):
            owners.sort()  # as the tokens of contiguous shards
        spans = [None if p is self.s.rank else self.s.chosen(self.held(p)) for p in owners]
        return self.s.array(name, kind, owners, spans=tuple(spans) if any(spans) else ())

    def needs(self, member: Ranks) -> Others:
        """Ranks across a member's tile: of this line's rows it needs those that meet theirs."""
        if (key := identity(member)) not in self._across:
            rows, cols = self.s.sizes.rows, self.s.sizes.cols
            if self.of_keys:
                found = tuple(member // cols * cols + j for j in range(cols))
            else:
                found = tuple(member % cols + i * cols for i in range(rows))
            self._across[key] = found
        return self._across[key]

    def needed_in(self, node: int) -> Others:
        """The same of all members in a node together; 0: in this rank's."""
        return tuple(chain.from_iterable(self.needs(p) for p, _ in self._nodes[node]))

    def held(self, owner: Ranks) -> Others:
        """The same for the rows of an owner that this rank holds, for itself or for its node."""
        node, distance = self.ways[identity(owner)]
        return self.needs(self.s.rank) if distance or not node else self.needed_in(0)

    def chunks(self, owner: Ranks, others: Others) -> list[tuple[int, int]]:
        """Chunks in which the rows of an owner travel that meet others."""
        return self.s.sizes.chunks(owner, self.ranks, self.of_keys, others)

    def _from(self, channel: str, peer: Ranks, owner: Ranks) -> list[Message]:
        chunks = self.chunks(owner, self.held(owner))
        return [self.s.receive(channel, peer, Rows(self._whole, owner, x)) for x in chunks]

    def coming(self, far_first: bool) -> dict[int, list[Message]]:
        """Messages that bring the others' rows, in the order of their use."""
        far: list[list[Message]] = []
        for owners, passed_on in zip(self._fetched, self._passed_on):
            fetched = [messages for _, messages in owners]
            # What this rank fetched is here first; what it sums for its node may be done last.
            far += passed_on + fetched if far_first else fetched + passed_on
        return dict(enumerate(far + self._near if far_first else self._near + far))

    def send(self, channel: str) -> None:
        """Send this rank's rows to the others of its node, or to those that fetch them."""
        # They are the first that the rank before this one needs, and the last of the next.
        if channel == self.name:
            peers = [(p, self.needed_in(d)) for d, p in enumerate(self.takers, 1)]
        else:
            peers = [(p, self.needs(p)) for p in self.near]
        for p, others in reversed(peers):
            self._send(channel, p, Rows(self._own, self.s.rank), others)

    def _send(self, channel: str, peer: Ranks, rows: Rows, others: Others) -> None:
        for x in self.chunks(rows.owner, others):
            self.s.send(channel, peer, rows._replace(part=self.s.chosen(others, x)))

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
        for owner, messages in chain.from_iterable(self._fetched[self._passed : nodes]):
            self.s.wait(messages)
            self._here.update(messages)
            for p in reversed(self.near):
                self._send(self.inside, p, Rows(self._whole, owner), self.needs(p))
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
        groups.setdefault(x, []).append(p)
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
