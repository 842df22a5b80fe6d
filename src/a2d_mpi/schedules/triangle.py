"""The triangle partition of the causal mask: every rank the same area, no half-empty tile.

The P = T (T-1) / 2 ranks are the pairs i > j of T segments.  Rank (i, j) computes the block of the
queries of segment i and the keys of segment j, and its share of both diagonal blocks, for which
all is at hand (`a2d_mpi.core.triangle`).  What it meets, its own slices included::

                      keys of j, A   keys of j, B   own keys of i
    own of j, B lower                  all visible
    own of j, B upper   all visible    all visible
    queries i, A         visible        visible       all visible
    queries i, B lower   visible        visible       all visible
    queries i, B upper   visible        visible

Queries are needed by the row members of a segment, keys by its column members.  Both travel round
rings of these members: an owner sends its slice once, and who gets it passes it on.  So no owner
of early keys, which most ranks need, sends more than others.  Partial results follow the queries,
one step behind, are merged on the way, and go from the last member to the owner; in the backward
pass dk and dv follow the keys.  Mean elements received forward, all heads KV heads:
4 (T-2) / (T (T-1)) of N H D, two thirds of those of the best grid for even T.

The partition into pairs of segments is that of parallel symmetric rank-k updates (Al Daas et al.,
"Parallel memory-independent communication bounds for SYRK", arXiv:2305.01197); diagonal, rings and
backward pass are ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from a2d_mpi.core import triangle
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.sizes import Span
from a2d_mpi.schedules.steps import Attend, Copy, Merge, Message, Rows, Schedule, Zero


class Ring:
    """The way of a segment's queries round its row members, or of its keys round the column ones.

    Parameters
    ----------
    s : Schedule
    channel : str
        "row" or "col": the team of the segment.
    of_keys : bool
    segment : int

    Attributes
    ----------
    span : Span
        Tokens of the segment.
    others : list of int
        Owners of the rows, but for this rank: those whose rows come first are first.
    """

    def __init__(self, s: Schedule, channel: str, of_keys: bool, segment: int) -> None:
        shards = s.sizes.shards
        t = triangle.segments(shards.nshards)
        rows, columns = triangle.row_members(segment), triangle.column_members(segment, t)
        members, feeders = (columns, rows) if of_keys else (rows, columns)
        self.s, self.channel = s, channel
        self.bounds = triangle.segment(shards.seqlen, t, segment)
        self.span = Span(self.bounds.begin, self.bounds.end)
        self.members = members
        s.channels[channel] = tuple(sorted(rows + columns))
        # Place on the ring where a slice enters.  Chosen among simple rules: with these the
        # largest rank sends least (0.70 to 0.75 of the best grid for 6 to 66 ranks).
        self._entry = {p: x for x, p in enumerate(members)}
        for x, p in enumerate(feeders if members else ()):
            self._entry[p] = (-x - 1 if of_keys else x + 1) % len(members)
        order = sorted(self._entry, key=lambda p: (self.distance(p), p not in members))
        self.others = [p for p in order if p != s.rank]

    def distance(self, owner: int) -> int:
        """Members that have the owner's rows before this rank gets them."""
        if self.s.rank not in self.members:
            return 0
        return (self.members.index(self.s.rank) - self._entry[owner]) % len(self.members)

    def neighbour(self, step: int) -> int:
        """The member after this one (1), or before it (-1)."""
        place = self.members.index(self.s.rank)
        return self.members[(place + step) % len(self.members)]

    def source(self, owner: int) -> int:
        """Where an owner's rows come from."""
        return self.neighbour(-1) if self.distance(owner) else owner

    def passes_on(self, owner: int) -> bool:
        """Tell whether the member after this one needs an owner's rows from it."""
        return self.distance(owner) < len(self.members) - 1

    def first(self) -> int | None:
        """To whom this rank sends its own rows; None: nobody else needs them."""
        if self.s.rank in self.members:
            return self.neighbour(1) if len(self.members) > 1 else None
        return self.members[self._entry[self.s.rank]] if self.members else None

    def last(self) -> int | None:
        """From whom the results for this rank's own rows come; None: from nobody."""
        if self.s.rank in self.members:
            return self.neighbour(-1) if len(self.members) > 1 else None
        return self.members[self._entry[self.s.rank] - 1] if self.members else None

    def post(self, kind: str, owners: list[tuple[int, Span]]) -> str:
        """Post the receives of all rows of a kind; returns the array that will have them."""
        s = self.s
        whole = f"{self.channel} {kind}"
        s.array(whole, kind, [p for p, _ in owners], spans=tuple(x for _, x in owners))
        self.coming = {
            p: s.receive(self.channel, self.source(p), Rows(whole, p, self.span))
            for p in self.others
        }
        return whole

    def arrivals(self) -> Iterator[Rows]:
        """Yield the others' rows as they come, passed on already."""
        for p, message in self.coming.items():
            self.s.wait([message])
            if self.passes_on(p):
                self.s.send(self.channel, self.neighbour(1), message.rows)
            yield message.rows

    def post_partials(self, kind: str) -> None:
        """Post the receives of what members before this one add to the others' results."""
        self._before: dict[int, Message] = {}
        for p in self.others:
            # The owner of rows keeps its own contribution.
            if self.distance(p) and self.source(p) != p:
                rows = Rows(self.s.array(f"{kind} of {p}", kind, (p,), spans=(self.span,)), p)
                rows = rows._replace(part=self.span)
                self._before[p] = self.s.receive(self.channel, self.neighbour(-1), rows)

    def give(self, partial: Rows) -> None:
        """Add to an owner's partial result what came with it, and send it on, at last home."""
        s, p = self.s, partial.owner
        if p in self._before:
            s.wait([self._before[p]])
            s.add(Merge(self._before[p].rows, partial))
        s.send(self.channel, self.neighbour(1) if self.passes_on(p) else p, partial)


class Block:
    """The rings around rank (i, j), and the kernel calls of its block and its diagonal shares.

    By query, keys are met first, one owner after the other, by this rank's own queries; then the
    others' queries meet all keys at once, and their results are finished.  By key: the same with
    the roles exchanged.
    """

    def __init__(self, s: Schedule, kind: str, by_query: bool) -> None:
        self.s = s
        i, j = triangle.pair(s.rank)
        self.q, self.k = Ring(s, "row", False, i), Ring(s, "col", True, j)
        # Rings of others that need this rank's slices: its queries of j, its keys of i.
        self._fed_q, self._fed_k = Ring(s, "col", False, j), Ring(s, "row", True, i)
        self.own_q = s.array(f"own {kind}", kind, (s.rank,), "given")
        self.own_k = s.array("own kv", "kv", (s.rank,), "given")
        self.early, self.late = (self.k, self.q) if by_query else (self.q, self.k)
        # Early rows are kept, with this rank's own, as the late ones meet all of them at once.
        own = [(s.rank, self.k.span), (s.rank, self.q.span)]
        kept = [(p, self.early.span) for p in sorted([*self.early.others, s.rank])]
        pieces = {
            self.early: [*kept, own[1]] if by_query else [own[0], *kept],
            self.late: [(p, self.late.span) for p in self.late.others],
        }
        self.all_k = self.k.post("kv", pieces[self.k])
        self.all_q = self.q.post(kind, pieces[self.q])
        for ring, array in (
            *((self.k, self.own_k), (self._fed_k, self.own_k)),
            *((self.q, self.own_q), (self._fed_q, self.own_q)),
        ):
            if ring.first() is not None:
                s.send(ring.channel, ring.first(), Rows(array, s.rank, ring.span))
        given, whole = (self.own_k, self.all_k) if by_query else (self.own_q, self.all_q)
        for p, span in own:
            s.add(Copy(Rows(given, p, span), Rows(whole, p, span)))

    def calls(self) -> Iterator[tuple[Rows, Rows, bool]]:
        """Yield queries and keys of each kernel call, and whether late rows have met all."""
        s = self.s
        arrived = ((ring, rows) for ring in (self.early, self.late) for rows in ring.arrivals())
        if not s.sizes.overlap:
            arrived = iter(list(arrived))
        yield Rows(self.own_q, s.rank), Rows(self.own_k, s.rank), False
        low, high = self.k.bounds, self.q.bounds
        for ring, rows in arrived:
            late, fed = ring is self.late, rows.owner not in ring.members
            owner = None if late else s.rank
            if ring is self.k:
                array = self.all_q if late else self.own_q
                # Keys of A: not for this rank's own queries of B's lower half.
                queries = Rows(array, owner, Span(low.half, high.end) if fed else None)
                yield queries, rows, late
            else:
                array = self.all_k if late else self.own_k
                lower = rows._replace(part=Span(high.begin, high.half))
                yield lower, Rows(array, owner), late and not fed
                if fed:  # queries of B's upper half: not for this rank's own keys of i
                    upper = rows._replace(part=Span(high.half, high.end))
                    yield upper, Rows(array, owner, self.k.span), late

    def returns(self, kind: str, of_keys: bool) -> list[Message]:
        """Post the receives of a kind of results: what others add to others' and to own ones."""
        s, found = self.s, []
        ring, fed = (self.k, self._fed_k) if of_keys else (self.q, self._fed_q)
        ring.post_partials(kind)
        for x in (ring, fed):
            if x.last() is not None:
                name = s.array(f"{kind} home, {x.channel}", kind, (s.rank,), spans=(x.span,))
                found.append(s.receive(x.channel, x.last(), Rows(name, s.rank, x.span)))
        return found


def forward(s: Schedule) -> None:
    """Write down the forward pass of rank ``s.rank``."""
    block = Block(s, "q", by_query=True)
    out = s.array("out", "out", (s.rank,), "result")
    home, held = block.returns("out", of_keys=False), []
    for queries, keys, done in block.calls():
        into, p = Rows(out, s.rank, queries.part), queries.owner
        if p != s.rank:
            name = s.array(f"out to {p}", "out", (p,), spans=(block.q.span,))
            into = Rows(name, p, queries.part)
        s.add(Attend(queries, keys, into))
        if done:
            held.append(into._replace(part=block.q.span))
            if s.sizes.overlap:
                block.q.give(held.pop())
    for partial in held:
        block.q.give(partial)
    _add(s, home, out)
    s.results = {"out": Rows(out, s.rank)}


def backward(s: Schedule) -> None:
    """Write down the backward pass of rank ``s.rank``."""
    # The larger of both reductions is finished one owner after the other.
    by_query = s.sizes.nheads >= 2 * s.sizes.nheads_kv
    block = Block(s, "qd", by_query)
    dq, dkv = (s.array(x, x, (s.rank,), "result") for x in ("dq", "dkv"))
    gradient = {block.own_q: dq, block.own_k: dkv}
    for rows, kind in ((block.all_q, "dq"), (block.all_k, "dkv")):
        like = s.arrays[rows]
        gradient[rows] = s.array(f"all {kind}", kind, like.owners, spans=like.spans)
    s.add(*(Zero(Rows(name)) for name in gradient.values()))
    home_q, home_k = block.returns("dq", of_keys=False), block.returns("dkv", of_keys=True)
    held = []
    for queries, keys, done in block.calls():
        into, keys_into = (x._replace(array=gradient[x.array]) for x in (queries, keys))
        s.add(Attend(queries, keys, into, keys_into))
        if done:
            late = into if block.late is block.q else keys_into
            held.append(late._replace(part=block.late.span))
            if s.sizes.overlap:
                block.late.give(held.pop())
    for partial in held:
        block.late.give(partial)
    kept, own = (block.all_k, dkv) if by_query else (block.all_q, dq)
    for p in block.early.others:
        block.early.give(Rows(gradient[kept], p, block.early.span))
    for span in (block.k.span, block.q.span):
        s.add(Merge(Rows(gradient[kept], s.rank, span), Rows(own, s.rank, span)))
    _add(s, home_q, dq)
    _add(s, home_k, dkv)
    s.results = {"dq": Rows(dq, s.rank), "dkv": Rows(dkv, s.rank)}


def _add(s: Schedule, home: list[Message], result: str) -> None:
    """Add what comes home to this rank's results."""
    for message in home:
        s.wait([message])
        s.add(Merge(message.rows, message.rows._replace(array=result)))


METHOD = Method(
    forward,
    backward,
    shape=lambda layout: (1, layout.positions, ""),
    distribution="triangle",
    suits=lambda layout: layout.cols == 1 and triangle.fits(layout.positions),
    causal=True,
    at_once=False,
)
