"""Lines: ranks among which rows of one kind travel, and partial results back to their owners.

On a plain grid a line is a row or a column.  Each rank sends its rows to the others that require
them, and gets their partial results for them.  On nodes and triangles the rows of an owner travel
down a tree (`a2d_mpi.schedules.trees`), and each rank combines the results of its children with
its own.  Methods do not know which trees they use.

There is no deadlock: rows that come straight from their owner, and results to which no other rank
adds, depend on nobody who waits, and both come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import NamedTuple

from a2d_mpi.masks.intervals import Runs, cut, size
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS, SUMS, Receive, Rows
from a2d_mpi.schedules.trees import Trees, by_node, from_here, star

GRAIN = 128  # tokens: a shard of at least 2 GRAIN tokens is cut at a multiple of GRAIN

# Takes an owner and ranks.  Returns the places in the owner's shard of the rows that any of these
# ranks requires.
Required = Callable[[int, Collection[int]], Runs]


class Ways(NamedTuple):
    """The ways of rows along a line, and of results back.

    Attributes
    ----------
    ranks : sequence of int
        All ranks of the line.  Rows and results of the first ones arrive first.
    required : callable
        See `Required`.
    trees : Trees, optional
        Trees of the rows.  Default: stars.
    back : Trees, optional
        Trees of the results, if all ranks require the same rows of an owner.  Default: `trees`.
    kept : sequence of Runs, optional
        Places of this rank's own rows that are held together with the rows of other owners.
        Default: all.  With kept = (a, b) rank 1 of three holds: a of rank 1, rows of rank 0, b of
        rank 1, rows of rank 2.
    near : collection of int
        Other ranks on this rank's node.  Their messages have a channel of their own.
    chunks : callable
        Cuts places into the chunks that travel.  Default: one message for each owner.
    """

    ranks: Sequence[int]
    required: Required
    trees: Trees | None = None
    back: Trees | None = None
    kept: Sequence[Runs] | None = None
    near: Collection[int] = ()
    chunks: Callable[[Runs], Iterable[Runs]] = lambda places: [places] if places else []


class Line:
    """The line of a rank.  It declares the rows that the rank needs; `start` posts their messages.

    On a plain grid all trees are stars, no rank passes rows on, and all own rows are kept.

    Parameters
    ----------
    p : Program
    name : str
        Name of the channel.
    own : str
        Array of this rank's shard.
    ways : Ways

    Attributes
    ----------
    array : str
        Array of these rows, owner by owner; without other owners, the array of the shard.
    others : list of int
        The other owners, in the order of arrival.
    """

    def __init__(self, p: Program, name: str, own: str, ways: Ways) -> None:
        self.p, self.name, self._ways = p, name, ways
        self._trees = ways.trees or star(p.rank, ways.ranks)
        self._back = ways.back or self._trees
        self._held_back: list[tuple[int, Rows]] = []
        self._order = {x: i for i, x in enumerate(ways.ranks)}
        for channel in (name, f"{name} node")[: 1 + bool(ways.near)]:
            p.channels[channel] = tuple(sorted(ways.ranks))
        self._tags = {x: i for i, x in enumerate(p.channels[name])}  # of messages, by owner
        parents = self._trees.parents
        owners = (x for x in ways.ranks if x in parents)
        self.others = sorted(owners, key=lambda x: parents[x] != x)
        of_keys, kind = p.arrays[own].of_keys, p.arrays[own].kind
        self.array, self._own = own, own
        self._kept = [p.group.all_places(of_keys, p.rank)] if ways.kept is None else ways.kept
        if self.others:
            mine = [(p.rank, x) for x in self._kept]
            pieces = sorted([*mine[-1:], *((x, self.needed(x)) for x in self.others)])
            self.array = p.array(f"{name} {kind}", kind, [*mine[:-1], *pieces], memory=name)

    @classmethod
    def of_row(cls, p: Program, kind: str) -> Line:
        """Make the line of a rank's row, with queries of this kind."""
        return cls._of_tiles(
            p, "row", p.own(f"own {kind}", kind, "given"), row_of(p.group, p.rank)
        )

    @classmethod
    def of_column(cls, p: Program) -> Line:
        """Make the line of a rank's column, with keys and values."""
        return cls._of_tiles(p, "col", p.own("own kv", "kv", "given"), column_of(p.group, p.rank))

    @classmethod
    def _of_tiles(cls, p: Program, name: str, own: Rows, ranks: range) -> Line:
        nodes = p.group.nodes or range(p.group.rows * p.group.cols)
        ordered = from_here(p.rank, ranks, nodes)
        ways = Ways(
            ordered,
            partial(required_by_tiles, p.group, p.arrays[own.array].of_keys),
            by_node(p.rank, ranks, nodes) if p.group.nodes else None,
            near=[x for x in ordered[1:] if nodes[x] == nodes[p.rank]],
            chunks=partial(chunked, ranks=len(ranks)),
        )
        return cls(p, name, own.array, ways)

    def start(self) -> Line:
        """Post the receives, send this rank's rows and copy those that it keeps; return itself."""
        p, parents = self.p, self._trees.parents
        self._coming = {
            x: self._receive(parents[x], x, self.array, self.needed(x)) for x in self.others
        }
        self._send_down(p.rank, self._own)
        for places in self._kept if self.others else ():
            p.copy(p.rows(self._own, p.rank, places), p.rows(self.array, p.rank, places))
        return self

    def needed(self, owner: int) -> Runs:
        """Return the places of an owner's rows that this rank gets, for itself and below it."""
        below = chain.from_iterable(self._trees.branches.get(owner, {}).values())
        return self._ways.required(owner, (self.p.rank, *below))

    def arrive(self, owner: int) -> Iterator[Rows]:
        """Wait for an owner's rows, chunk by chunk; pass them on, and yield them."""
        for message in self._coming[owner]:
            self.p.wait([message])
            self._send_down(owner, self.array)
            yield message.rows

    def result(self, kind: str, owner: int, rows: Rows) -> Rows:
        """Declare partial results for all rows of an owner; return those for the given rows."""
        # Results that others add to keep the accumulation dtype until they are sent.
        accumulated = KINDS[kind] if owner in self._back.branches else SUMS
        name, pieces = f"{kind} to {owner}", [(owner, self.needed(owner))]
        return self.p.matching(self.p.array(name, kind, pieces, accumulated=accumulated), rows)

    def give(self, owner: int, rows: Rows) -> None:
        """Send a finished partial result to the parent, or hold it back if others add to it."""
        if owner in self._back.branches:
            self._held_back.append((owner, rows))
        else:
            self._send(self._back.parents[owner], owner, rows)

    def give_all(self, array: str) -> None:
        """Give the partial results for all other owners."""
        for owner in self._by_result():
            for places in self._ways.chunks(self.needed(owner)):
                self.give(owner, self.p.rows(array, owner, places))

    def finish(self, array: str) -> None:
        """Combine all ranks' results for this rank's rows with its own ones, in a fixed order.

        Before that, send what `give` still holds back.
        """
        self.send_held_back()
        self._combine(self.p.rank, array)

    def send_held_back(self) -> None:
        """Send the results to which other ranks add, and which `give` held back: none in stars."""
        for owner, rows in self._held_back:
            self._combine(owner, rows.array)
            self._send(self._back.parents[owner], owner, self._stored(rows))
        self._held_back = []

    def _stored(self, rows: Rows) -> Rows:
        """Return rows of sums in the dtypes in which they are sent: out is rounded once."""
        p, array = self.p, self.p.arrays[rows.array]
        if not p.group.config.mixed_precision or array.accumulated == SUMS:
            return rows
        name = p.array(f"rounded {rows.array}", array.kind, array.pieces)
        p.copy(rows, rows.of(name))
        return rows.of(name)

    def _by_result(self) -> list[int]:
        """Return the other owners in the order of their results, see the top of the module."""
        return sorted(self.others, key=lambda x: (x in self._ways.near, x in self._back.branches))

    def _combine(self, owner: int, array: str) -> None:
        p, kind = self.p, self.p.arrays[array].kind
        branches = self._back.branches.get(owner, {})
        for child in sorted(branches, key=self._order.__getitem__):
            places = self._ways.required(owner, branches[child])
            part = p.array(f"{self.name} {kind} of {owner} from {child}", kind, [(owner, places)])
            p.wait(self._receive(child, owner, part, places))
            p.combine(p.rows(part), p.rows(array, owner, places))

    def _send_down(self, owner: int, array: str) -> None:
        # Ranks that pass the rows on come first.  In a star the previous rank needs them first:
        # rank 1 of four computes with the rows of 1, 2, 3, 0 in turn, so rank 2 sends to 1 first.
        branches, order = self._trees.branches.get(owner, {}), self._order
        for child in sorted(branches, key=lambda x: (len(branches[x]) == 1, -order[x])):
            for places in self._ways.chunks(self._ways.required(owner, branches[child])):
                self._send(child, owner, self.p.rows(array, owner, places))

    def _send(self, peer: int, owner: int, rows: Rows) -> None:
        self.p.send(self._channel(peer), peer, rows, self._tags[owner])

    def _receive(self, peer: int, owner: int, array: str, places: Runs) -> list[Receive]:
        p, channel, tag = self.p, self._channel(peer), self._tags[owner]
        rows = (p.rows(array, owner, x) for x in self._ways.chunks(places))
        return [p.receive(channel, peer, x, tag) for x in rows]

    def _channel(self, peer: int) -> str:
        return f"{self.name} node" if peer in self._ways.near else self.name


def row_of(group: Group, rank: int) -> range:
    """Return the ranks of a rank's row: the owners of its tile's queries."""
    first = rank // group.cols * group.cols
    return range(first, first + group.cols)


def column_of(group: Group, rank: int) -> range:
    """Return the ranks of a rank's column: the owners of its tile's keys."""
    return range(rank % group.cols, group.rows * group.cols, group.cols)


def required_by_tiles(group: Group, of_keys: bool, owner: int, ranks: Collection[int]) -> Runs:
    """Return the places of an owner's rows that tiles of ranks in its row or column require.

    A tile needs the keys that any query of its row sees, and the queries that see any key of its
    column.
    """
    across = partial(row_of if of_keys else column_of, group)
    if len(ranks) == 1:
        return group.required(of_keys, owner, across(*ranks))
    return group.required(of_keys, owner, frozenset(chain(*map(across, ranks))))


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


def arrivals(early: Line, late: Line) -> Iterator[tuple[Line, int, Rows]]:
    """Yield line, owner and rows as they arrive: all of the early line, then all of the late one.

    Rows of both lines that other ranks wait for come first, in turn, and are passed on.  In stars
    there are none, and the last two loops yield all.
    """
    passed = [[(y, x) for x in y.others if x in y._trees.branches] for y in (early, late)]
    arrived: dict[int, list[Rows]] = {}
    for line, owner in filter(None, chain(*zip_longest(*passed))):
        if line is late:
            arrived[owner] = list(late.arrive(owner))
        else:
            yield from ((early, owner, rows) for rows in early.arrive(owner))
    for owner in (x for x in early.others if x not in early._trees.branches):
        yield from ((early, owner, rows) for rows in early.arrive(owner))
    for owner in late._by_result():
        rows_of = arrived[owner] if owner in arrived else late.arrive(owner)
        yield from ((late, owner, rows) for rows in rows_of)
