"""Rows and columns of a grid, node by node: who fetches what, and the all-gather of their rows.

Of a shard a node gets the rows that any of its ranks requires, and from the rank that fetches them
each other rank gets the rows that it requires.  The fetcher computes on all that it holds: the
mask hides the rest from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.group import chunked
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Receive


class Line:
    """A row or column, by node, as one of its ranks sees it, and its all-gather.

    Parameters
    ----------
    p : Program
    name : {"row", "col"}
        Of its channel between nodes.
    own : str
        Array of this rank's rows.

    Attributes
    ----------
    inside : str
        Channel inside a node.
    near : list of int
        The other ranks of this rank's node, next first.
    far : list of list of (int, int)
        The ranks of every other node, next node first, each with the distance of the member of
        this rank's node that fetches its rows: `near` from 1; 0, this rank itself, comes last.
    takers : list of int
        The rank of every other node that fetches this rank's rows.
    gathered : str
        Array of this rank's rows and of all rows that it fetches or requires.
    """

    def __init__(self, p: Program, name: str, own: str) -> None:
        self.p, self.name, self.inside, self._own = p, name, f"{name} node", own
        self.of_keys = name == "col"
        self._nodes, self.takers = self._by_node()
        ranks, *self.far = self._nodes
        self.near = [x for x, distance in ranks if distance]
        self.ways = {x: (d, e) for d, node in enumerate(self._nodes) for x, e in node}
        self.ranks = len(self.ways)
        if self.near:
            p.channels[self.inside] = p.channels[name]
        self._passed = 0 if self.near else len(self.far)  # nodes whose rows were passed on
        self._here: set[Receive] = set()
        self.gathered = own
        if self.ranks > 1:
            whole = p.group.whole(self.of_keys, p.rank)
            pieces = [(x, whole if x == p.rank else self.held(x)) for x in sorted(self.ways)]
            self.gathered = p.array(name, p.arrays[own].kind, pieces)

    def _by_node(self) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """The ranks of the line by node, this rank's own first, and `takers`.

        With each rank the distance, in this rank's node, of the member that fetches its rows:
        place k is fetched by place k mod b of b members.
        """
        p, groups = self.p, {}
        for x in p.channels[self.name]:
            groups.setdefault(x if p.group.nodes is None else p.group.nodes[x], []).append(x)
        own = p.rank if p.group.nodes is None else p.group.nodes[p.rank]
        names = sorted(groups)
        names = names[names.index(own) :] + names[: names.index(own)]
        b, i = len(groups[own]), groups[own].index(p.rank)
        nodes = [
            sorted(((x, (k - i) % b) for k, x in enumerate(groups[n])), key=lambda x: x[1] or b)
            for n in names
        ]
        return nodes, [groups[n][i % len(groups[n])] for n in names[1:]]

    def post(self) -> None:
        """Post the receives of all rows."""
        self._fetched = [
            [(x, self._from(self.name, x, x)) for x, e in node if not e] for node in self.far
        ]
        self._near = [(x, self._from(self.inside, x, x)) for x in self.near]
        self._passed_on = [
            [(x, self._from(self.inside, self.near[e - 1], x)) for x, e in node if e]
            for node in self.far
        ]

    def across(self, member: int) -> range:
        """Ranks across a member's tile: it requires this line's rows that their rows see."""
        return (self.p.group.row_of if self.of_keys else self.p.group.column_of)(member)

    def required(self, owner: int, member: int) -> Runs:
        """Places of the owner's rows that a member requires."""
        return self.p.group.required(self.of_keys, owner, self.across(member))

    def required_in(self, owner: int, node: int) -> Runs:
        """Places of the owner's rows that any member in a node requires; 0: this rank's node."""
        members = chain.from_iterable(self.across(x) for x, _ in self._nodes[node])
        return self.p.group.required(self.of_keys, owner, frozenset(members))

    def held(self, owner: int) -> Runs:
        """Places of the owner's rows that this rank holds, for itself or for its node."""
        node, distance = self.ways[owner]
        if distance or not node:
            return self.required(owner, self.p.rank)
        return self.required_in(owner, 0)

    def chunks(self, places: Runs) -> list[Runs]:
        """Places in the chunks in which they travel."""
        return chunked(places, self.ranks)

    def _from(self, channel: str, peer: int, owner: int) -> list[Receive]:
        p = self.p
        return [
            p.receive(channel, peer, p.rows(self.gathered, owner, chunk))
            for chunk in self.chunks(self.held(owner))
        ]

    def coming(self, far_first: bool) -> list[tuple[int, Receive]]:
        """Messages that bring the others' rows, with the owner, in the order of their use."""
        far: list[tuple[int, list[Receive]]] = []
        for fetched, passed_on in zip(self._fetched, self._passed_on):
            # What this rank fetched is here first; what it sums for its node may be done last.
            far += passed_on + fetched if far_first else fetched + passed_on
        ordered = far + self._near if far_first else self._near + far
        return [(owner, message) for owner, messages in ordered for message in messages]

    def send(self, channel: str) -> None:
        """Send this rank's rows to the others of its node, or to the ranks that fetch them."""
        me = self.p.rank
        # They are the first that the rank before this one needs, and the last of the next.
        if channel == self.name:
            peers = [(x, self.required_in(me, d)) for d, x in enumerate(self.takers, 1)]
        else:
            peers = [(x, self.required(me, x)) for x in self.near]
        for peer, places in reversed(peers):
            self._send(channel, peer, self._own, me, places)

    def _send(self, channel: str, peer: int, array: str, owner: int, places: Runs) -> None:
        for chunk in self.chunks(places):
            self.p.send(channel, peer, self.p.rows(array, owner, chunk))

    def keep(self) -> None:
        """Put this rank's rows beside the rows of the others."""
        if self.ranks > 1:
            self.p.copy(self.p.rows(self._own), self.p.rows(self.gathered, self.p.rank))

    def pass_on(self, nodes: int) -> None:
        """Pass the rows of the first other nodes on to this rank's node, when they are here."""
        for owner, messages in chain.from_iterable(self._fetched[self._passed : nodes]):
            self.p.wait(messages)
            self._here.update(messages)
            for peer in reversed(self.near):
                places = self.required(owner, peer)
                self._send(self.inside, peer, self.gathered, owner, places)
        self._passed = max(self._passed, nodes)

    def wait(self, messages: Iterable[Receive]) -> None:
        """Wait for messages; what this rank fetched was waited for when it was passed on."""
        self.p.wait(x for x in messages if x not in self._here)


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
