"""Arithmetic on sorted runs of integers, and on intervals of keys of many queries at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

# A set of integers as runs [begin, end) in ascending order.  Runs do not overlap or touch, and
# none is empty.
Runs = tuple[tuple[int, int], ...]
# (begin, end), each (nq,) int64: an interval of keys for every query.
Interval = tuple[np.ndarray, np.ndarray]

EVERYTHING = np.iinfo(np.int64).max


class Intervals(tuple[Interval, ...]):
    """Visible keys of the queries of a block: pairs (begin, end), each (nq,) int64.

    The arrays must not change.

    Attributes
    ----------
    prepared : dict
        Data that kernels derive from the intervals and use again.  The key of an entry holds the
        kernel and everything else that the entry depends on.  A plan passes the same object in
        every call, so each kernel prepares a block once.
    varying : bool
        As of `a2d_mpi.masks.mask.Mask`.
    """

    varying = False

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self.prepared: dict[object, object] = {}


def tidy(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the same visible keys in as few intervals as possible.

    Parameters
    ----------
    intervals : tuple of (begin, end), each (nq,) int64
        The intervals of a query are disjoint.  An interval with ``end <= begin`` is empty.

    Returns
    -------
    tuple of (begin, end), each (nq,) int64
        At least one pair.  The intervals of a query ascend and do not touch; empty ones are last.
    """
    pairs = tuple(intervals)
    if len(pairs) == 1:
        return pairs
    begin, end = (np.stack(x) for x in zip(*pairs))  # (m, nq)
    begin, end = _sorted(begin, end)
    touching = (end[:-1] == begin[1:]) & (end[1:] > begin[1:]) & (end[:-1] > begin[:-1])
    if touching.any():
        for i, here in enumerate(touching):  # extend the second interval, and empty the first
            begin[i + 1, here] = begin[i, here]
            end[i, here] = begin[i, here]
        begin, end = _sorted(begin, end)
    used = max(1, int((end > begin).any(axis=1).sum()))
    return tuple((begin[i], end[i]) for i in range(used))


def _sorted(begin: np.ndarray, end: np.ndarray) -> Interval:
    """Sort the intervals of each query; empty intervals come last."""
    order = np.argsort(np.where(end > begin, begin, EVERYTHING), axis=0, kind="stable")
    return np.take_along_axis(begin, order, 0), np.take_along_axis(end, order, 0)


def size(runs: Runs) -> int:
    """Count the integers in runs."""
    return sum(end - begin for begin, end in runs)


def cut(runs: Runs, first: int, last: int) -> Runs:
    """Select integers ``[first, last)``, counted from the first integer of the runs."""
    selected, passed = [], 0
    for begin, end in runs:
        a, b = begin + max(first - passed, 0), min(end, begin + last - passed)
        if a < b:
            selected.append((a, b))
        passed += end - begin
    return tuple(selected)


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
    runs: list[tuple[int, int]] = []
    for begin, end in ordered:
        if runs and begin <= runs[-1][1]:
            if end > runs[-1][1]:
                runs[-1] = runs[-1][0], end
        elif begin < end:
            runs.append((begin, end))
    return tuple(runs)


def members(ordered: range, runs: Runs) -> list[tuple[int, int]]:
    """Find the elements of an arithmetic progression that lie in runs.

    Return ``(first, last)`` for each run that holds elements: it holds the elements
    ``[first, last)`` of `ordered`.
    """
    places = []
    first = bisect_right(runs, ordered.start, key=lambda run: run[1])
    for begin, end in runs[first:]:
        if begin >= ordered.stop:
            break
        a, b = before(ordered, begin), before(ordered, end)
        if a < b:
            places.append((a, b))
    return places


def before(ordered: range, limit: int) -> int:
    """Count the elements of an ascending arithmetic progression that are less than a limit."""
    return len(range(ordered.start, min(ordered.stop, limit), ordered.step))


def keys_per_query(intervals: tuple[Interval, ...]) -> np.ndarray:
    """Return the number of keys that each query sees, (nq,) int64.

    Parameters
    ----------
    intervals : tuple of (begin, end), each (nq,) int64
        Intervals with ``begin <= end``, as `Mask.intervals` returns them.
    """
    return sum(end - begin for begin, end in intervals)


def queries_per_key(intervals: Iterable[Interval], nk: int) -> np.ndarray:
    """Return the number of queries that see each key, (nk,) int64.

    Parameters
    ----------
    intervals : iterable of (begin, end), each (nq,) int64
        Visible keys of every query; an interval with ``end <= begin`` is empty.
    nk : int
        The counted keys are ``[0, nk)``.
    """
    changes = np.zeros(nk + 1, np.int64)
    for begin, end in intervals:
        begin, end = (np.clip(x, 0, nk) for x in (begin, end))
        changes += np.bincount(begin, minlength=nk + 1)
        changes -= np.bincount(np.maximum(begin, end), minlength=nk + 1)
    return np.cumsum(changes)[:nk]


def overlap(begin: np.ndarray, end: np.ndarray) -> tuple[str, int] | None:
    """Find a query that has two intervals with a common key.

    Parameters
    ----------
    begin, end : (m, nq) int64
        The m intervals of every query; an interval with ``end <= begin`` is empty.

    Returns
    -------
    (str, int) or None
        The two intervals in words, and the index of the query; None if no intervals overlap.
    """
    if (np.maximum(begin, end)[:-1] <= begin[1:]).all():  # ascending, the usual case
        return None
    begin, end = _sorted(np.where(end > begin, begin, EVERYTHING), end)
    wrong = np.argwhere(end[:-1] > begin[1:])
    if not len(wrong):
        return None
    row, i = wrong[0]
    first, second = ([int(begin[x, i]), int(end[x, i])] for x in (row, row + 1))
    return f"intervals {first} and {second}", int(i)
