"""The triangle partition of the causal mask: equal areas, and no half-empty tile.

Each of the P = T (T-1) / 2 ranks belongs to a pair i > j of T segments.  Rank (i, j) computes the
tile of the queries of segment i and the keys of segment j.  It also computes its share of both
diagonal tiles, for which it has all rows (`a2d_mpi.sharding.triangle_shards`).  The visible pairs
of a rank, with its own slices, are::

                      keys of j, A   keys of j, B   own keys of i
    own of j, B lower                  all visible
    own of j, B upper   all visible    all visible
    queries i, A         visible        visible       all visible
    queries i, B lower   visible        visible       all visible
    queries i, B upper   visible        visible

The row members of a segment need its queries, and its column members need its keys.  Partial
results go back to the owners: out and dq of queries, dk and dv of keys.  All rows travel along
trees that spread traffic evenly (`a2d_mpi.sharding.trees`).  With as many KV heads as heads, a
rank receives 4 (T-2) / (T (T-1)) N H D elements in a forward pass, on average.  For even T this is
two thirds of the elements of the best grid.

Symmetric matrix products are partitioned into pairs of segments in the same way (Al Daas, Ballard,
Grigori, Kumar and Rouse, "Parallel Memory-Independent Communication Bounds for SYRK", SPAA 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache

from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.line import Line, Ways, arrivals
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Rows
from a2d_mpi.schedules.trees import Trees, seen_from
from a2d_mpi.sharding import triangle_shards as shares
from a2d_mpi.sharding.trees import trees


class TriangleLines:
    """The lines of rank (i, j), and the kernel calls of its tile and its diagonal shares.

    The rank needs the queries of i (`q`) and the keys of j (`k`).  Other ranks need its queries of
    j and its keys of i, in two lines that it only feeds (`fed_q`, `fed_k`).

    By query, this rank's own queries first meet the keys of one owner after the other.  Then the
    queries of each other owner meet all keys in one call, and their results are finished.  By key,
    queries and keys exchange their roles.
    """

    def __init__(self, p: Program, kind: str, by_query: bool) -> None:
        self.p, (i, j), shards = p, shares.pair(p.rank), p.group.problem.queries
        self._shards, self._pair, self._t = shards, (i, j), shares.segments(shards.nshards)
        # The places in an owner's shard of its tokens in [begin, end).
        self._places = cache(lambda owner, *bounds: shards.places(owner, (bounds,)))
        self.low, self.high = (shares.segment(shards.seqlen, self._t, s) for s in (j, i))
        self.own_q = p.own(f"own {kind}", kind, "given")
        self.own_k = p.own("own kv", "kv", "given")
        # Early rows are kept, with this rank's own rows: late rows meet all of them in one call.
        sides = {"q": self.high, "k": self.low}
        self.own = {x: self._places(p.rank, y.begin, y.end) for x, y in sides.items()}
        self.k = self._line(True, j, [self.own["q"], self.own["k"]] * by_query)
        self.fed_k = self._line(True, i)
        self.q = self._line(False, i, [self.own["k"], self.own["q"]] * (not by_query))
        self.fed_q = self._line(False, j)
        self.early, self.late = (self.k, self.q) if by_query else (self.q, self.k)

    def _line(self, of_keys: bool, segment: int, kept: Sequence[Runs] = ()) -> Line:
        """Make the line of the queries, or the keys, of a segment among the ranks that have it."""
        p, t = self.p, self._t
        team = sorted(shares.row_members(segment) + shares.column_members(segment, t))
        bounds = shares.segment(self._shards.seqlen, t, segment)
        own = self.own_k if of_keys else self.own_q
        of = p.group.elements
        # Elements of a row of queries, and of a row of keys: there, and back.
        there, back = (of("q"), of("k", "v")), (of("out"), 0)
        if p.arrays[self.own_q.array].kind == "qd":
            there, back = (of("q", "dout"), of("k", "v")), (of("dq"), of("dk", "dv"))

        def trees_of(sizes: tuple[int, int]) -> Trees:
            parents = trees(t, *sizes)
            return seen_from(p.rank, {x: parents[segment, of_keys, x] for x in team})

        def required(owner: int, members: Collection[int]) -> Runs:
            return self._places(owner, bounds.begin, bounds.end)

        index = team.index(p.rank)  # the nearest previous ranks come first
        ordered = [*reversed(team[: index + 1]), *reversed(team[index + 1 :])]
        name = "row" if segment == self._pair[0] else "col"
        ways = Ways(ordered, required, trees_of(there), trees_of(back), kept)
        return Line(p, name, own.array, ways).start()

    def calls(self) -> Iterator[tuple[Line | None, int, Rows, Rows, bool]]:
        """Yield line and owner of the rows that arrived last, queries and keys of each call.

        The last value says whether the owner's results are finished: late rows have then met all
        early rows.  There is no line for the call with this rank's own rows.
        """
        p, low, high, (i, j) = self.p, self.low, self.high, self._pair
        members = {self.q: shares.row_members(i), self.k: shares.column_members(j, self._t)}
        yield None, p.rank, self.own_q, self.own_k, False
        for line, owner, rows in arrivals(self.early, self.late):
            late, fed = line is self.late, owner not in members[line]
            if line is self.k:
                # Keys of A are hidden from this rank's own queries of the lower half of B.
                array = self.q.array if late else self.own_q.array
                queries = p.rows_within(array, low.half if fed else 0, high.end)
                yield line, owner, queries, rows, late
                continue
            keys = self.k.array if late else self.own_k.array
            lower = p.rows(line.array, owner, self._places(owner, high.begin, high.half))
            yield line, owner, lower, p.rows(keys), late and not fed
            if fed:  # queries of the upper half of B do not see this rank's own keys of i
                upper = p.rows(line.array, owner, self._places(owner, high.half, high.end))
                yield line, owner, upper, p.rows_within(keys, low.begin, low.end), late


def forward(p: Program) -> None:
    """Write the forward pass of a rank."""
    lines, out = TriangleLines(p, "q", by_query=True), p.own("out", "out", "result")
    for line, owner, queries, keys, done in lines.calls():
        if line is lines.q:
            result = line.result("out", owner, queries)
            p.attend(queries, keys, result)
            if done:
                line.give(owner, p.rows(result.array))
        elif line is None:
            p.attend(queries, keys, out)
        else:
            p.attend_and_merge(queries, keys, p.matching("out", queries))
    for line in (lines.q, lines.fed_q):
        line.finish("out")
    p.results = {"out": out}


def backward(p: Program) -> None:
    """Write the backward pass of a rank."""
    # The larger of the two reductions is finished one owner after the other.
    lines = TriangleLines(p, "qd", by_query=p.group.elements("dq") >= p.group.elements("dk", "dv"))
    early = lines.early
    dq, dkv = p.own("dq", "dq", "result"), p.own("dkv", "dkv", "result")
    sums = {lines.own_q.array: "dq", lines.own_k.array: "dkv"}
    for line, kind in ((lines.q, "dq"), (lines.k, "dkv")):
        if line.others:
            sums[line.array] = p.zeros(f"all {kind}", kind, line.array)
    p.clear(dq)
    p.clear(dkv)
    for line, owner, queries, keys, done in lines.calls():
        into = (x.of(sums[x.array]) for x in (queries, keys))
        p.differentiate(queries, keys, *into)
        if done:
            line.give(owner, p.rows(sums[line.array], owner))
    early.give_all(sums[early.array])
    for line in (lines.late, early):
        line.send_held_back()
    for places in lines.own.values() if early.others else ():
        kept = p.rows(sums[early.array], p.rank, places)
        p.combine(kept, p.rows("dkv" if early is lines.k else "dq", p.rank, places))
    every = lines.q, lines.fed_q, lines.k, lines.fed_k
    for line, array in zip(every, ("dq", "dq", "dkv", "dkv")):
        line.finish(array)
    p.results = {"dq": dq, "dkv": dkv}


METHOD = Method(
    forward,
    backward,
    group_shape=lambda layout: (1, layout.positions),
    distribution="triangle",
    causal=True,
    suits=lambda layout: layout.cols == 1 and shares.fits(layout.positions),
    most_positions=shares.largest,
)
