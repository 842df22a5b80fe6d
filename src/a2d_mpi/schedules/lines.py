"""Node-aware all-gathers along rows and columns of a grid.

One rank of each node fetches the rows of a shard that any rank of the node requires.  The other
ranks of the node then get their required rows from the fetcher.  The fetcher's kernel calls use
all rows that it holds; the mask hides the rows that its own tile does not require.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.chunks import chunked
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Receive


class NodeLine:
    """The row or column of a rank, divided into nodes, and its all-gather.

    Parameters
    ----------
    p : Program
    name : {"row", "col"}
        Name of the channel between nodes.
    own : str
        Array of this rank's rows.

    Attributes
    ----------
    inside : str
        Name of the channel inside a node.
    near : list of int
        The other ranks of this rank's node, beginning with the next one.
    far : list of list of (int, int)
        The ranks of every other node, beginning with the next node.  The second number says which
        rank of this rank's node fetches the rows: ``near[i - 1]`` for i > 0, and this rank for 0.
        Ranks with 0 come last.
    takers : list of int
        The rank of every other node that fetches this rank's rows.
    gathered : str
        Array with this rank's rows and with all rows that it fetches or requires.
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
        # Number of nodes whose rows were passed on.
        self._passed = 0 if self.near else len(self.far)
        self._arrived: set[Receive] = set()
        self.gathered = own
        if self.ranks > 1:
            own_places = p.group.all_places(self.of_keys, p.rank)
            pieces = [(x, own_places if x == p.rank else self.held(x)) for x in sorted(self.ways)]
            self.gathered = p.array(name, p.arrays[own].kind, pieces)

    def _by_node(self) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Return the ranks of the line by node, this rank's node first, and `takers`.

        Each rank comes with its fetcher, see `far`.  In a node of b ranks, rank k mod b fetches
        the rows of rank k of another node.
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
        """Return the owners of the other side of a member's tile.

        The member requires this line's rows that are in visible pairs with their rows.
        """
        return (self.p.group.row_of if self.of_keys else self.p.group.column_of)(member)

    def required(self, owner: int, member: int) -> Runs:
        """Return the places of the owner's rows that a member requires."""
        return self.p.group.required(self.of_keys, owner, self.across(member))

    def required_in(self, owner: int, node: int) -> Runs:
        """Return the places of the owner's rows that any member in a node requires.

        Node 0 is this rank's node.
        """
        members = chain.from_iterable(self.across(x) for x, _ in self._nodes[node])
        return self.p.group.required(self.of_keys, owner, frozenset(members))

    def held(self, owner: int) -> Runs:
        """Return the places of the owner's rows that this rank holds, for itself or its node."""
        node, distance = self.ways[owner]
        if distance or not node:
            return self.required(owner, self.p.rank)
        return self.required_in(owner, 0)

    def chunks(self, places: Runs) -> list[Runs]:
        """Cut places into the chunks that travel."""
        return chunked(places, self.ranks)

    def _from(self, channel: str, peer: int, owner: int) -> list[Receive]:
        p = self.p
        return [
            p.receive(channel, peer, p.rows(self.gathered, owner, chunk))
            for chunk in self.chunks(self.held(owner))
        ]

    def coming(self, far_first: bool) -> list[tuple[int, Receive]]:
        """Return the owners and messages of the other ranks' rows, in the order of their use."""
        far: list[tuple[int, list[Receive]]] = []
        for fetched, passed_on in zip(self._fetched, self._passed_on):
            # Rows that this rank fetches arrive first.  But with `far_first` this rank sums the
            # results for their owners, so these results are needed last.
            far += passed_on + fetched if far_first else fetched + passed_on
        ordered = far + self._near if far_first else self._near + far
        return [(owner, message) for owner, messages in ordered for message in messages]

    def send(self, channel: str) -> None:
        """Send this rank's rows to the other ranks of its node, or to the ranks that fetch them.

        `channel` is `inside` or `name`.
        """
        me = self.p.rank
        # The previous rank needs these rows first, and the next rank needs them last.
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
        """Copy this rank's rows into the array `gathered`."""
        if self.ranks > 1:
            self.p.copy(self.p.rows(self._own), self.p.rows(self.gathered, self.p.rank))

    def pass_on(self, nodes: int) -> None:
        """Wait for the rows of the first `nodes` other nodes, and pass them on inside the node."""
        for owner, messages in chain.from_iterable(self._fetched[self._passed : nodes]):
            self.p.wait(messages)
            self._arrived.update(messages)
            for peer in reversed(self.near):
                places = self.required(owner, peer)
                self._send(self.inside, peer, self.gathered, owner, places)
        self._passed = max(self._passed, nodes)

    def wait(self, messages: Iterable[Receive]) -> None:
        """Wait for messages, except those that have arrived and were passed on."""
        self.p.wait(x for x in messages if x not in self._arrived)


def equal_share(node: np.ndarray) -> int:
    """Return how many ranks of a line each of its nodes has; 0 if the numbers differ.

    Parameters
    ----------
    node : (lines, ranks of a line) int
        The node of every rank.
    """
    ordered = np.sort(node, axis=1)
    b = int(np.sum(ordered[0] == ordered[0, 0]))
    if ordered.shape[1] % b:
        return 0
    nodes = ordered.reshape(len(ordered), -1, b)
    equal = (nodes == nodes[:, :, :1]).all() and (nodes[:, 1:, 0] != nodes[:, :-1, 0]).all()
    return b * bool(equal)
