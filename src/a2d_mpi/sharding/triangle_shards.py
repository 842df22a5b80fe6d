"""Segments, teams and slices of the triangle partition of a causal mask.

The sequence is cut into T segments.  Each of the P = T (T-1) / 2 ranks belongs to a pair i > j of
segments.  Rank ``i (i-1) / 2 + j`` computes the tile of the queries of segment i and the keys of
segment j.  The T-1 ranks that have segment s in their pair are its *team*.  *Row members* (s, j)
need all queries of the segment.  *Column members* (i, s) need all of its keys.  A rank owns a
slice of both of its segments, and the slices of a segment are equal.

The diagonal tile of a segment needs no message.  Row members own its first tokens A.  Column
members own the other tokens B.  B is cut into a lower and an upper half::

    queries   A         own keys of A: row members
              B lower   own keys of A: row members   own queries: column members
              B upper   own queries: column members
                        keys A                       keys B

No query of A sees a key of B.  A slice of A is two pieces, mirrored at the middle of A.  A slice
of B is one piece of each half, mirrored at the border of the halves.  So all ranks have the same
area.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Segment(NamedTuple):
    """Bounds of a segment in the sequence.

    A is [begin, first).  The lower half of B is [first, half), and the upper half is [half, end).
    """

    begin: int
    first: int
    half: int
    end: int


def segments(shards: int) -> int:
    """Return T, the number of segments of a triangle with `shards` shards.

    Raises
    ------
    ValueError
        If `shards` is not T (T-1) / 2 for any T.
    """
    t = _segments(shards)
    if t * (t - 1) != 2 * shards:
        below, above = (x * (x - 1) // 2 for x in (t, t + 1))
        raise ValueError(
            f"a triangle needs T (T-1) / 2 ranks (times the ranks that share the heads), such as "
            f"{below} or {above}, got {shards}"
        )
    return t


def fits(shards: int) -> bool:
    """Return True if a triangle with at least three segments has `shards` shards."""
    return shards > 1 and largest(shards) == shards


def largest(shards: int) -> int:
    """Return the size of the largest triangle that has at most `shards` shards."""
    t = _segments(shards)
    return t * (t - 1) // 2


def pair(rank: int) -> tuple[int, int]:
    """Return the segments i > j of a rank, which has the queries of i and the keys of j."""
    i = _segments(rank)
    return i, rank - i * (i - 1) // 2


def row_members(s: int) -> list[int]:
    """Return the s ranks that need the queries of segment s."""
    return [s * (s - 1) // 2 + j for j in range(s)]


def column_members(s: int, t: int) -> list[int]:
    """Return the T-1-s ranks that need the keys of segment s."""
    return [i * (i - 1) // 2 + s for i in range(s + 1, t)]


def segment(seqlen: int, t: int, s: int) -> Segment:
    """Return the bounds of segment s of T."""
    begin, end = seqlen * s // t, seqlen * (s + 1) // t
    first = begin + (end - begin) * s // (t - 1)
    return Segment(begin, first, first + (end - first) // 2, end)


def pieces(seqlen: int, t: int, rank: int) -> tuple[range, ...]:
    """Return the tokens of a rank, in order: its slice of segment j, then its slice of i."""
    i, j = pair(rank)
    _, first, half, end = segment(seqlen, t, j)
    place, members = i - j - 1, t - 1 - j
    lower = _cut(first, half, place, members)
    upper = _cut(half, end, members - 1 - place, members)
    begin, first = segment(seqlen, t, i)[:2]
    early, late = (_cut(begin, first, x, 2 * i) for x in (j, 2 * i - 1 - j))
    return lower, upper, early, late


def _segments(shards: int) -> int:
    """Return the number of segments of the largest triangle with at most `shards` shards."""
    return (1 + math.isqrt(1 + 8 * shards)) // 2


def _cut(begin: int, end: int, place: int, places: int) -> range:
    n = end - begin
    return range(begin + n * place // places, begin + n * (place + 1) // places)
