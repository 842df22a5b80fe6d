"""Interval arithmetic: sorted runs of integers, and intervals of keys of many queries at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

# Integers [begin, end) in ascending order; the runs neither overlap nor touch, and none is empty.
Runs = tuple[tuple[int, int], ...]
Interval = tuple[np.ndarray, np.ndarray]

EVERYTHING = np.iinfo(np.int64).max


class Intervals(tuple[Interval, ...]):
    """Visible keys of the queries of a block: pairs (begin, end), each (nq,) int64.

    The arrays must not change.

    Attributes
    ----------
    prepared : dict
        What kernels made from the intervals, by kernel and by all else that it depends on.  A plan
        passes the same object at every call, so each kernel prepares a block once.
    """

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self.prepared: dict[object, object] = {}

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> Intervals:
        """The same object if it is one of this class already."""
        return intervals if isinstance(intervals, cls) else cls(intervals)


def tidy(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same visible keys in as few intervals as possible.

    Parameters
    ----------
    intervals : tuple of (begin, end), each (nq,) int64
        Disjoint ones of every query; ``end <= begin`` is an empty one.

    Returns
    -------
    tuple of (begin, end), each (nq,) int64
        At least one.  Of a query in ascending order, empty ones last; none touch.
    """
    found = tuple(intervals)
    if len(found) == 1:
        return found
    begin, end = (np.stack(x) for x in zip(*found))  # (m, nq)
    begin, end = _sorted(begin, end)
    touching = (end[:-1] == begin[1:]) & (end[1:] > begin[1:]) & (end[:-1] > begin[:-1])
    if touching.any():
        for i, here in enumerate(touching):  # the later one takes it all, the earlier is empty
            begin[i + 1, here] = begin[i, here]
            end[i, here] = begin[i, here]
        begin, end = _sorted(begin, end)
    used = max(1, int((end > begin).any(axis=1).sum()))
    return tuple((begin[i], end[i]) for i in range(used))


def _sorted(begin: np.ndarray, end: np.ndarray) -> Interval:
    """Intervals of each query in ascending order, empty ones last."""
    order = np.argsort(np.where(end > begin, begin, EVERYTHING), axis=0, kind="stable")
    return np.take_along_axis(begin, order, 0), np.take_along_axis(end, order, 0)


def size(runs: Runs) -> int:
    """Count the integers in runs."""
    if len(runs) == 1:  # mostly
        return runs[0][1] - runs[0][0]
    return sum(end - begin for begin, end in runs)


def cut(runs: Runs, first: int, last: int) -> Runs:
    """Select integers by their rank among all integers of the runs: ``[first, last)``."""
    if len(runs) == 1:  # mostly
        begin, end = runs[0]
        end = min(end, begin + last)
        begin += first
        return ((begin, end),) if begin < end else ()
    found, before = [], 0
    for begin, end in runs:
        a, b = begin + max(first - before, 0), min(end, begin + last - before)
        if a < b:
            found.append((a, b))
        before += end - begin
    return tuple(found)


def common(runs: Runs, begin: int, end: int) -> Runs:
    """Restrict runs to ``[begin, end)``."""
    return tuple(
        (a if a > begin else begin, b if b < end else end)
        for a, b in runs
        if a < end and begin < b
    )


def union(several: Iterable[Runs]) -> Runs:
    """Merge several sets of runs, which may overlap, into one."""
    return joined(sorted(run for runs in several for run in runs))


def joined(ordered: Iterable[tuple[int, int]]) -> Runs:
    """Join the runs that overlap or touch, among runs sorted by their begin."""
    found: list[tuple[int, int]] = []
    for begin, end in ordered:
        if found and begin <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def runs_of(covered: np.ndarray) -> Runs:
    """Find the runs of true elements of a boolean array."""
    edges = np.flatnonzero(np.diff(covered, prepend=False, append=False)).tolist()
    return tuple(zip(edges[::2], edges[1::2]))


def members(ordered: range, runs: Runs) -> list[tuple[int, int]]:
    """Find the places, in an arithmetic progression, of its elements that lie in runs.

    Returns ``(first, last)`` for each run that has any: elements ``[first, last)`` of `ordered`.
    """
    found = []
    first = bisect_right(runs, ordered.start, key=lambda run: run[1])
    for begin, end in runs[first:]:
        if begin >= ordered.stop:
            break
        a, b = before(ordered, begin), before(ordered, end)
        if a < b:
            found.append((a, b))
    return found


def before(ordered: range, limit: int) -> int:
    """Count the elements of an ascending arithmetic progression that are less than a limit."""
    return len(range(ordered.start, min(ordered.stop, limit), ordered.step))


def merged(runs: Iterable[range]) -> list[range]:
    """Join the runs of consecutive integers that overlap or touch; in order, none is empty."""
    return [range(a, b) for a, b in joined(sorted((r.start, r.stop) for r in runs if r))]


def keys_per_query(intervals: tuple[Interval, ...]) -> np.ndarray:
    """Number of keys that each query sees, (nq,) int64; for `intervals` of `Mask.intervals`."""
    return sum(end - begin for begin, end in intervals)


def queries_per_key(intervals: Iterable[Interval], nk: int, first: int = 0) -> np.ndarray:
    """Number of queries that see each of the keys ``[first, first + nk)``: (nk,) int64.

    Parameters
    ----------
    intervals : iterable of (begin, end), each (nq,) int64
        Visible keys of every query; ``end <= begin`` is an empty interval.
    nk, first : int
    """
    steps = np.zeros(nk + 1, np.int64)
    for begin, end in intervals:
        begin, end = (np.clip(x, first, first + nk) - first for x in (begin, end))
        steps += np.bincount(begin, minlength=nk + 1)
        steps -= np.bincount(np.maximum(begin, end), minlength=nk + 1)
    return np.cumsum(steps)[:nk]


def overlap(begin: np.ndarray, end: np.ndarray) -> tuple[str, int] | None:
    """Find a query two of whose intervals share a key.

    Parameters
    ----------
    begin, end : (m, nq) int64
        The m intervals of every query; ``end <= begin`` is an empty one.

    Returns
    -------
    (str, int) or None
        The two intervals in words, and the place of the query.
    """
    if (np.maximum(begin, end)[:-1] <= begin[1:]).all():  # in order, as mostly
        return None
    begin, end = _sorted(np.where(end > begin, begin, EVERYTHING), end)
    wrong = np.argwhere(end[:-1] > begin[1:])
    if not len(wrong):
        return None
    row, i = wrong[0]
    first, second = ([int(begin[x, i]), int(end[x, i])] for x in (row, row + 1))
    return f"intervals {first} and {second}", int(i)
