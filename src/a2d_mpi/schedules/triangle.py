"""The triangle partition of the causal mask: equal areas, and no half-empty tile.

Each of the P = T (T-1) / 2 ranks belongs to a pair i > j of T segments.  Rank (i, j) computes the
tile of the queries of segment i and the keys of segment j.  It also computes its share of both
diagonal tiles, for which it has all rows (`a2d_mpi.sharding.triangle`).  The visible pairs of a
rank, with its own slices, are::

                      keys of j, A   keys of j, B   own keys of i
    own of j, B lower                  all visible
    own of j, B upper   all visible    all visible
    queries i, A         visible        visible       all visible
    queries i, B lower   visible        visible       all visible
    queries i, B upper   visible        visible

The row members of a segment need its queries, and its column members need its keys.  Partial
results go back to the owners: out and dq of queries, dk and dv of keys.  All rows travel along
trees that spread traffic evenly (`a2d_mpi.schedules.trees`).  With as many KV heads as heads, a
rank receives 4 (T-2) / (T (T-1)) N H D elements in a forward pass, on average.  For even T this is
two thirds of the elements of the best grid.

Symmetric matrix products are partitioned into pairs of segments in the same way (Al Daas, Ballard,
Grigori, Kumar and Rouse, "Parallel Memory-Independent Communication Bounds for SYRK", SPAA 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS, SUMS, Receive, Rows
from a2d_mpi.schedules.trees import trees
from a2d_mpi.sharding import triangle


class Side:
    """The queries, or the keys, of a segment, which travel to the members that need them.

    Parameters
    ----------
    p : Program
    channel : {"row", "col"}
        Channel of the team of the segment.
    of_keys : bool
        Whether this is the side of keys; otherwise of queries.
    segment : int
    sizes : (int, int)
        Elements of a row of queries, and of a row of keys, when they are gathered.
    back : (int, int)
        Elements of their results, which travel back.

    Attributes
    ----------
    bounds : Segment
    others : list of int
        Other owners whose rows this rank needs, in the order of arrival.
    """

    def __init__(
        self,
        p: Program,
        channel: str,
        of_keys: bool,
        segment: int,
        sizes: tuple[int, int],
        back: tuple[int, int],
    ) -> None:
        shards = p.group.problem.shards
        t = triangle.segments(shards.nshards)
        members = [triangle.row_members(segment), triangle.column_members(segment, t)]
        self.p, self.channel, self.members = p, channel, members[of_keys]
        self.bounds = triangle.segment(shards.seqlen, t, segment)
        team = tuple(sorted(members[0] + members[1]))
        p.channels[channel] = team
        self._team = team
        self._there, self._back = (
            {x: found[segment, of_keys, x] for x in team}
            for found in (trees(t, *sizes), trees(t, *back))
        )
        place = team.index(p.rank)
        self._after = {x: (i - place) % len(team) for i, x in enumerate(team)}
        needed = [x for x in team if x != p.rank and p.rank in self.members]
        # Rows directly from their owner arrive first, then rows through another member.  In both
        # groups, the nearest previous owners come first.
        self.others = sorted(needed, key=lambda x: (self._there[x][p.rank] != x, -self._after[x]))

    def slice(self, owner: int) -> Runs:
        """Return the places of the owner's tokens in the segment."""
        shards = self.p.group.problem.shards
        return shards.places(owner, ((self.bounds.begin, self.bounds.end),))

    def children(self, owner: int) -> list[int]:
        """Return the ranks to which this rank sends an owner's rows.

        Ranks that pass the rows on come first.  Then the order is by distance from this rank.
        """
        tree = self._there[owner]
        passing = set(tree.values())
        children = [x for x, parent in tree.items() if parent == self.p.rank]
        return sorted(children, key=lambda x: (x not in passing, self._after[x]))

    def helpers(self, owner: int) -> list[int]:
        """Return the ranks whose partial results of an owner's rows this rank merges."""
        helpers = [x for x, parent in self._back[owner].items() if parent == self.p.rank]
        return sorted(helpers, key=lambda x: -self._after[x])

    def post(self, kind: str, pieces: list[tuple[int, Runs]]) -> str:
        """Post the receives of all rows of a kind; return the name of their array."""
        p, array = self.p, f"{self.channel} {kind}"
        p.array(array, kind, pieces)
        self._coming = {x: self._receive(self._there[x][p.rank], array, x) for x in self.others}
        return array

    def send(self, array: str, owner: int) -> None:
        """Send an owner's rows to the ranks that get them from this rank."""
        for peer in self.children(owner):
            self.p.send(self.channel, peer, *self._tagged(array, owner))

    def arrive(self, array: str, owner: int) -> None:
        """Wait for an owner's rows, and pass them on."""
        self.p.wait([self._coming[owner]])
        self.send(array, owner)

    def post_partials(self, kind: str) -> None:
        """Post the receives of all partial results that this rank merges."""
        p = self.p
        self._partials: dict[int, list[Receive | None]] = {}
        for owner in [*self.others, p.rank]:
            for i, peer in enumerate(self.helpers(owner)):
                name = f"{kind} {self.channel} {i} of {owner}"
                p.array(name, kind, [(owner, self.slice(owner))])
                self._partials.setdefault(owner, []).append(self._receive(peer, name, owner))

    def is_helped(self, owner: int) -> bool:
        """Return True if this rank receives partial results of other ranks for an owner's rows."""
        return owner in self._partials

    def merge(self, array: str, owner: int) -> None:
        """Merge the received partial results for an owner's rows in the segment."""
        for message in self._partials.get(owner, []):
            if message:
                self.p.wait([message])
                self.p.combine(message.rows, self.p.rows(array, owner, self.slice(owner)))

    def give(self, array: str, owner: int) -> None:
        """Merge received partial results with this rank's result for an owner; send the result."""
        self.merge(array, owner)
        peer = self._back[owner][self.p.rank]
        self.p.send(self.channel, peer, *self._tagged(array, owner))

    def _receive(self, peer: int, array: str, owner: int) -> Receive | None:
        return self.p.receive(self.channel, peer, *self._tagged(array, owner))

    def _tagged(self, array: str, owner: int) -> tuple[Rows, int]:
        """Return the rows of an owner, and a tag for their messages: its place in the team."""
        return self.p.rows(array, owner, self.slice(owner)), self._team.index(owner)


class TriangleTile:
    """The sides of the tile of rank (i, j), and the kernel calls of its tile and diagonal shares.

    By query, this rank's own queries first meet the keys of one owner after the other.  Then the
    queries of each other owner meet all keys in one call, and their results are finished.  By key,
    queries and keys exchange their roles.
    """

    def __init__(self, p: Program, backward: bool, by_query: bool) -> None:
        self.p, (i, j) = p, triangle.pair(p.rank)
        self.gathers_first = p.group.gathers_first(backward)
        of, kv = p.group.elements, p.group.elements("k", "v")
        kind, sizes, back = "q", (of("q"), kv), (of("out"), 0)
        if backward:
            kind, sizes, back = "qd", (of("q", "dout"), kv), (of("dq"), of("dk", "dv"))
        side = functools.partial(Side, p, sizes=sizes, back=back)
        self.q, self.k = side("row", False, i), side("col", True, j)
        # Other ranks need this rank's queries of segment j, and its keys of segment i.
        self.fed_q, self.fed_k = side("col", False, j), side("row", True, i)
        self.own_q, self.own_k = (
            p.own(f"own {kind}", kind, "given"),
            p.own("own kv", "kv", "given"),
        )
        self.early, self.late = (self.k, self.q) if by_query else (self.q, self.k)
        # Early rows are kept, with this rank's own rows: late rows meet all of them in one call.
        own = [(p.rank, self.k.slice(p.rank)), (p.rank, self.q.slice(p.rank))]
        kept = [(x, self.early.slice(x)) for x in sorted([*self.early.others, p.rank])]
        pieces = {
            self.early: [*kept, own[1]] if by_query else [own[0], *kept],
            self.late: [(x, self.late.slice(x)) for x in self.late.others],
        }
        self.all_k = self.k.post("kv", pieces[self.k])
        self.all_q = self.q.post(kind, pieces[self.q])
        for feeding in (self.k, self.fed_k):
            feeding.send(self.own_k.array, p.rank)
        for feeding in (self.q, self.fed_q):
            feeding.send(self.own_q.array, p.rank)
        given, gathered = (self.own_k, self.all_k) if by_query else (self.own_q, self.all_q)
        for _, places in own:
            p.copy(p.rows(given.array, p.rank, places), p.rows(gathered, p.rank, places))

    def calls(self) -> Iterator[tuple[int, Rows, Rows, bool]]:
        """Yield owner, queries and keys of each kernel call, and whether a result is finished.

        The owner is the owner of the rows that arrived last.  A result is finished if its late
        rows have met all early rows.
        """
        p, me = self.p, self.p.rank
        arrived = self._arrivals()
        if not p.group.overlap:
            arrived = iter(list(arrived))
        yield me, self.own_q, self.own_k, False
        low, high = self.k.bounds, self.q.bounds
        for side, owner in arrived:
            late, fed = side is self.late, owner not in side.members
            if side is self.k:
                # Keys of A are hidden from this rank's own queries of the lower half of B.
                first = low.half if fed else 0
                array = self.all_q if late else self.own_q.array
                queries = p.rows_within(array, first, high.end)
                yield owner, queries, p.rows(self.all_k, owner, side.slice(owner)), late
            else:
                keys = p.sorted(self.all_k) if late else self.own_k.array
                places = p.group.problem.shards.places
                lower = p.rows(self.all_q, owner, places(owner, ((high.begin, high.half),)))
                yield owner, lower, p.rows(keys), late and not fed
                if fed:  # queries of the upper half of B do not see this rank's own keys of i
                    upper = p.rows(self.all_q, owner, places(owner, ((high.half, high.end),)))
                    yield owner, upper, p.rows_within(keys, low.begin, low.end), late

    def _arrivals(self) -> Iterator[tuple[Side, int]]:
        """Wait for all rows and pass them on; yield early rows at once and late rows at the end.

        Rows that other ranks wait for come first, early and late rows in turn.
        """
        p, arrays, held = self.p, {self.q: self.all_q, self.k: self.all_k}, []
        order = [
            (not side.children(x), i, side is self.late, side)
            for side in (self.early, self.late)
            for i, x in enumerate(side.others)
        ]
        for _, i, late, side in sorted(order, key=lambda x: x[:3]):
            owner = side.others[i]
            side.arrive(arrays[side], owner)
            if late:
                held.append((side, owner))
            else:
                yield side, owner
        if self.gathers_first:
            p.gathered("row", "col")
        yield from held


def forward(p: Program) -> None:
    """Write the forward pass of a rank."""
    tile = TriangleTile(p, backward=False, by_query=True)
    out = p.own("out", "out", "result")
    for side in (tile.q, tile.fed_q):
        side.post_partials("out")
    held = []
    for owner, queries, keys, done in tile.calls():
        target = "out"
        if queries.array != tile.own_q.array:
            accumulated = KINDS["out"] if tile.q.is_helped(owner) else SUMS
            pieces = [(owner, tile.q.slice(owner))]
            target = p.array(f"out to {owner}", "out", pieces, accumulated=accumulated)
        p.attend(queries, keys, p.matching(target, queries))
        if done:
            held += _given(tile.q, target, owner)
    _give(held)
    for side in (tile.q, tile.fed_q):
        side.merge("out", p.rank)
    p.results = {"out": out}


def backward(p: Program) -> None:
    """Write the backward pass of a rank."""
    # The larger of the two reductions is finished one owner after the other.
    by_query = p.group.elements("dq") >= p.group.elements("dk", "dv")
    tile = TriangleTile(p, backward=True, by_query=by_query)
    dq, dkv = p.own("dq", "dq", "result"), p.own("dkv", "dkv", "result")
    p.clear(dq)
    p.clear(dkv)
    all_dq = p.sums("all dq", "dq", tile.all_q)
    all_dkv = p.sums("all dkv", "dkv", tile.all_k, by_token=by_query)
    home = ((tile.q, "dq"), (tile.fed_q, "dq"), (tile.k, "dkv"), (tile.fed_k, "dkv"))
    for side, kind in home:
        side.post_partials(kind)
    late, early = ("all dq", "all dkv") if by_query else ("all dkv", "all dq")
    held = []
    for owner, queries, keys, done in tile.calls():
        own_q, own_k = queries.array == tile.own_q.array, keys.array == tile.own_k.array
        into = queries._replace(array="dq") if own_q else all_dq(queries)
        keys_into = keys._replace(array="dkv") if own_k else all_dkv(keys)
        p.differentiate(queries, keys, into, keys_into)
        if done:
            held += _given(tile.late, late, owner)
    _give([*held, *((tile.early, early, owner) for owner in tile.early.others)])
    for side in (tile.k, tile.q):
        places = side.slice(p.rank)
        own = "dkv" if by_query else "dq"
        p.combine(p.rows(early, p.rank, places), p.rows(own, p.rank, places))
    for side, kind in home:
        side.merge(kind, p.rank)
    p.results = {"dq": dq, "dkv": dkv}


Unsent = list[tuple[Side, str, int]]  # partial results: side, and array and owner of the rows


def _given(side: Side, array: str, owner: int) -> Unsent:
    """Send a finished partial result at once; return it if other results must be merged first."""
    if side.p.group.overlap and not side.is_helped(owner):
        side.give(array, owner)
        return []
    return [(side, array, owner)]


def _give(held: Unsent) -> None:
    """Send partial results; results that wait for other ranks come last."""
    for side, array, owner in sorted(held, key=lambda x: x[0].is_helped(x[2])):
        side.give(array, owner)


def _cuts(problem: Problem) -> list[int]:
    """Return the first token of every segment: partial results belong to slices of segments."""
    t = triangle.segments(problem.shards.nshards)
    return [triangle.segment(problem.config.seqlen, t, s).begin for s in range(t)]


METHOD = Method(
    forward,
    backward,
    shape=lambda layout: (1, layout.positions, ""),
    distribution="triangle",
    suits=lambda layout: layout.cols == 1 and triangle.fits(layout.positions),
    most_positions=triangle.largest,
    causal=True,
    roundings=lambda layout, kind: 2,
    cuts=_cuts,
)
