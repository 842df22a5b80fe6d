"""Intervals of keys, of many queries at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Interval = tuple[np.ndarray, np.ndarray]

EVERYTHING = np.iinfo(np.int64).max


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
