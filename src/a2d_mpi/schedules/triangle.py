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

Queries are needed by the row members of a segment, keys by its column members.  Partial results of
queries go back to their owners, merged; in the backward pass also those of keys.  All of them
travel along trees that spread the sending and the receiving evenly (`a2d_mpi.schedules.trees`).
Mean elements received forward, all heads KV heads: 4 (T-2) / (T (T-1)) of N H D, two thirds of
those of the best grid for even T.

Symmetric matrix products are partitioned into pairs of segments in the same way (Al Daas, Ballard,
Grigori, Kumar and Rouse, "Parallel Memory-Independent Communication Bounds for SYRK", SPAA 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from a2d_mpi.core import triangle
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import Span
from a2d_mpi.schedules.steps import KINDS, WIDE, Attend, Copy, Merge, Message, Rows, Zero
from a2d_mpi.schedules.trees import trees


class Side:
    """The queries, or the keys, of a segment, as this rank meets them: on their way to members.

    Parameters
    ----------
    s : Schedule
    channel : str
        "row" or "col": the team of the segment.
    of_keys : bool
    segment : int
    sizes : (int, int)
        Of slices of queries and keys, when they are gathered.
    back : (int, int)
        Of their results.

    Attributes
    ----------
    span : Span
        Tokens of the segment.
    others : list of int
        Owners of rows that this rank needs from others: those whose rows come first are first.
    """

    def __init__(
        self,
        s: Schedule,
        channel: str,
        of_keys: bool,
        segment: int,
        sizes: tuple[int, int],
        back: tuple[int, int],
    ) -> None:
        shards = s.sizes.problem.shards
        t = triangle.segments(shards.nshards)
        members = [triangle.row_members(segment), triangle.column_members(segment, t)]
        self.s, self.channel, self.members = s, channel, members[of_keys]
        self.bounds = triangle.segment(shards.seqlen, t, segment)
        self.span = Span(self.bounds.begin, self.bounds.end)
        team = tuple(sorted(members[0] + members[1]))
        s.channels[channel] = team
        self._there, self._back = (
            {p: found[segment, of_keys, p] for p in team}
            for found in (trees(t, *sizes), trees(t, *back))
        )
        place = team.index(s.rank)
        self._after = {p: (x - place) % len(team) for x, p in enumerate(team)}
        needed = [p for p in team if p != s.rank and s.rank in self.members]
        # Straight from the owner; then through others.  Owners nearest before this rank first.
        self.others = sorted(needed, key=lambda p: (self._there[p][s.rank] != p, -self._after[p]))

    def children(self, owner: int) -> list[int]:
        """To whom this rank sends an owner's rows: who passes them on first, nearest following."""
        tree = self._there[owner]
        passing = set(tree.values())
        found = [x for x, parent in tree.items() if parent == self.s.rank]
        return sorted(found, key=lambda x: (x not in passing, self._after[x]))

    def helpers(self, owner: int) -> list[int]:
        """From whom this rank gets partial results of an owner's rows, to merge them."""
        found = [x for x, parent in self._back[owner].items() if parent == self.s.rank]
        return sorted(found, key=lambda x: -self._after[x])

    def post(self, kind: str, pieces: list[tuple[int, Span]]) -> str:
        """Post the receives of all rows of a kind; returns the array that will have them."""
        s = self.s
        whole = f"{self.channel} {kind}"
        s.array(whole, kind, [p for p, _ in pieces], spans=tuple(x for _, x in pieces))
        self._coming = {
            p: s.receive(self.channel, self._there[p][s.rank], Rows(whole, p, self.span))
            for p in self.others
        }
        return whole

    def send(self, rows: Rows) -> None:
        """Send an owner's rows to those who get them from this rank."""
        for p in self.children(rows.owner):
            self.s.send(self.channel, p, rows)

    def arrive(self, owner: int) -> Rows:
        """Wait for an owner's rows, and pass them on."""
        message = self._coming[owner]
        self.s.wait([message])
        self.send(message.rows)
        return message.rows

    def post_partials(self, kind: str) -> None:
        """Post the receives of all partial results that this rank merges."""
        s = self.s
        self._partials: dict[int, list[Message]] = {}
        for p in [*self.others, s.rank]:
            for i, x in enumerate(self.helpers(p)):
                name = f"{kind} {self.channel} {i} of {p}"
                rows = Rows(s.array(name, kind, (p,), spans=(self.span,)), p, self.span)
                self._partials.setdefault(p, []).append(s.receive(self.channel, x, rows))

    def is_helped(self, owner: int) -> bool:
        """Tell whether others give this rank their partial results for an owner's rows."""
        return owner in self._partials

    def merge(self, to: Rows) -> None:
        """Merge what came for an owner's rows."""
        for message in self._partials.get(to.owner, []):
            self.s.wait([message])
            self.s.add(Merge(message.rows, to))

    def give(self, partial: Rows) -> None:
        """Merge what came for an owner's rows with this rank's own part, and send it on."""
        s, array = self.s, self.s.arrays[partial.array]
        self.merge(partial)
        if s.sizes.narrow and array.wide != WIDE:  # merged as it is computed, rounded once
            name = s.array(
                f"{partial.array}, rounded", array.kind, array.owners, spans=array.spans
            )
            s.add(Copy(partial, rounded := partial._replace(array=name)))
            partial = rounded
        s.send(self.channel, self._back[partial.owner][s.rank], partial)


class Block:
    """The sides that rank (i, j) meets, and the calls of its block and its diagonal shares.

    By query, keys are met first, one owner after the other, by this rank's own queries; then the
    others' queries meet all keys at once, and their results are finished.  By key: the same with
    the roles exchanged.
    """

    def __init__(self, s: Schedule, kind: str, by_query: bool) -> None:
        self.s, (i, j) = s, triangle.pair(s.rank)
        q, kv = s.sizes.nheads, 2 * s.sizes.nheads_kv
        sizes, back = ((q, kv), (q, 0)) if kind == "q" else ((2 * q, kv), (q, kv))
        side = functools.partial(Side, s, sizes=sizes, back=back)
        self.q, self.k = side("row", False, i), side("col", True, j)
        # Others need this rank's slices, too: its queries of j, and its keys of i.
        self.fed_q, self.fed_k = side("col", False, j), side("row", True, i)
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
        for side in (self.k, self.fed_k):
            side.send(Rows(self.own_k, s.rank, side.span))
        for side in (self.q, self.fed_q):
            side.send(Rows(self.own_q, s.rank, side.span))
        given, whole = (self.own_k, self.all_k) if by_query else (self.own_q, self.all_q)
        for p, span in own:
            s.add(Copy(Rows(given, p, span), Rows(whole, p, span)))

    def calls(self) -> Iterator[tuple[Rows, Rows, bool]]:
        """Yield queries and keys of each kernel call, and whether late rows have met all."""
        s = self.s
        arrived = self._arrivals()
        if not s.sizes.overlap:
            arrived = iter(list(arrived))
        yield Rows(self.own_q, s.rank), Rows(self.own_k, s.rank), False
        low, high = self.k.bounds, self.q.bounds
        for side, rows in arrived:
            late, fed = side is self.late, rows.owner not in side.members
            owner = None if late else s.rank
            if side is self.k:
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

    def _arrivals(self) -> Iterator[tuple[Side, Rows]]:
        """Pass all rows on as they come; yield early ones at once, then the late ones.

        Rows that others wait for are first, early and late ones in turn.
        """
        sides, held = (self.early, self.late), []
        order = [
            (not side.children(p), i, side is self.late, side)
            for side in sides
            for i, p in enumerate(side.others)
        ]
        for _, i, late, side in sorted(order, key=lambda x: x[:3]):
            rows = side.arrive(side.others[i])
            if late:
                held.append(rows)
            else:
                yield side, rows
        for rows in held:
            yield self.late, rows


def forward(s: Schedule) -> None:
    """Write down the forward pass of rank ``s.rank``."""
    block = Block(s, "q", by_query=True)
    out = s.array("out", "out", (s.rank,), "result")
    for side in (block.q, block.fed_q):
        side.post_partials("out")
    held = []
    for queries, keys, done in block.calls():
        into, p = Rows(out, s.rank, queries.part), queries.owner
        if p != s.rank:
            wide = KINDS["out"] if block.q.is_helped(p) else WIDE
            name = s.array(f"out to {p}", "out", (p,), spans=(block.q.span,), wide=wide)
            into = Rows(name, p, queries.part)
        s.add(Attend(queries, keys, into))
        if done:
            held += _given(block.q, into._replace(part=block.q.span))
    _give(held)
    for side in (block.q, block.fed_q):
        side.merge(Rows(out, s.rank, side.span))
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
    home = ((block.q, "dq"), (block.fed_q, "dq"), (block.k, "dkv"), (block.fed_k, "dkv"))
    for side, kind in home:
        side.post_partials(kind)
    held = []
    for queries, keys, done in block.calls():
        into, keys_into = (x._replace(array=gradient[x.array]) for x in (queries, keys))
        s.add(Attend(queries, keys, into, keys_into))
        if done:
            late = into if block.late is block.q else keys_into
            held += _given(block.late, late._replace(part=block.late.span))
    kept, own = (block.all_k, dkv) if by_query else (block.all_q, dq)
    early = block.early
    held += [(early, Rows(gradient[kept], p, early.span)) for p in early.others]
    _give(held)
    for span in (block.k.span, block.q.span):
        s.add(Merge(Rows(gradient[kept], s.rank, span), Rows(own, s.rank, span)))
    for side, kind in home:
        side.merge(Rows(dq if kind == "dq" else dkv, s.rank, side.span))
    s.results = {"dq": Rows(dq, s.rank), "dkv": Rows(dkv, s.rank)}


Partials = list[tuple[Side, Rows]]


def _given(side: Side, partial: Rows) -> Partials:
    """Send a finished partial result at once, or return it: others are to be merged with it."""
    if side.s.sizes.overlap and not side.is_helped(partial.owner):
        side.give(partial)
        return []
    return [(side, partial)]


def _give(held: Partials) -> None:
    """Send partial results; last those that wait for others."""
    for side, partial in sorted(held, key=lambda x: x[0].is_helped(x[1].owner)):
        side.give(partial)


METHOD = Method(
    forward,
    backward,
    shape=lambda layout: (1, layout.positions, ""),
    distribution="triangle",
    suits=lambda layout: layout.cols == 1 and triangle.fits(layout.positions),
    whole=triangle.largest,
    causal=True,
    at_once=False,
)
