"""Mask shapes: a block cut into runs of queries that see one shape each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from a2d_mpi.masks.intervals import Interval

CUT = 128  # cuDNN's tiles
LONGEST = 2048  # queries of a general run: the keys that any of them sees are few then

# The step of (begin, end) from each query to the next, as 2 x begin + end; others have none.
_SHAPES = ("full", "causal", "anti-causal", "band")
_BREAK, _EMPTY = -1, 4


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive queries that see one mask shape.

    Attributes
    ----------
    rows : slice
        The queries.
    shape : str
        The mask shape.  "full": all queries see the same keys.  "causal": the last query sees all
        of `keys`, each one before it one key fewer.  "anti-causal": the first query sees all of
        `keys`, each one after it one key fewer, the first.  "band": like causal, and each query
        sees `window` keys.  "empty": nobody sees a key.  "general": any other shape.
    keys : slice
        From the first to the last key that any of the queries sees.
    window : int
        Keys that each query sees, for a band.
    begin, end : (queries,) int64
        Visible keys of these queries, as positions among all keys of the block.
    """

    rows: slice
    shape: str
    keys: slice
    window: int
    begin: np.ndarray
    end: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start

    @property
    def area(self) -> int:
        """Visible pairs."""
        return int(np.maximum(self.end - self.begin, 0).sum())


def runs(interval: Interval, shortest: int = 1, pairs: int | None = None) -> list[Run]:
    """Cut a block into runs of queries, each of one mask shape.

    Of a mask with several intervals, each is cut on its own.

    Parameters
    ----------
    interval : (begin, end), each (nq,) int
        Visible keys of each query, as positions among the keys of the block.
    shortest : int
        Neighbouring runs of fewer queries make one general run: a launch each would cost more.
    pairs : int, optional
        Runs that have more pairs of queries and keys, hidden ones too, are cut into some of a
        multiple of `CUT` queries, as few as keep to it or have `CUT`.

    Returns
    -------
    list of Run
        In the order of the queries, all of which they cover.  General ones have `LONGEST` queries
        at most.
    """
    begin, end = (np.asarray(x, np.int64) for x in interval)
    found: list[tuple[int, int, str]] = []
    for first, last, shape in _steps(begin, end):
        short = last - first < shortest
        if found and short:
            a, b, before = found[-1]
            if before == "general" or b - a < shortest:
                found[-1] = (a, last, "general")
                continue
        found.append((first, last, shape))
    return [
        _run(begin, end, a, b, shape)
        for first, last, shape in found
        for a, b in _cuts(begin, end, int(first), int(last), shape, pairs)
    ]


def _steps(begin: np.ndarray, end: np.ndarray) -> list[tuple[int, int, str]]:
    """Maximal runs of simple shapes, as (first, last + 1, shape)."""
    nq, seen = len(begin), end > begin
    by = np.stack([np.diff(begin), np.diff(end)])
    step = by[0] * 2 + by[1]
    step[((by < 0) | (by > 1)).any(axis=0) | (seen[1:] != seen[:-1])] = _BREAK
    step[~seen[1:] & ~seen[:-1]] = _EMPTY  # neighbours that see nothing stay together
    cuts = np.append(np.flatnonzero(np.diff(step)) + 1, nq - 1)  # where the step changes
    found, first = [], 0
    while first < nq:
        code, last = int(step[first]) if first < nq - 1 else _BREAK, first + 1
        if code != _BREAK:
            last = int(cuts[np.searchsorted(cuts, first, side="right")]) + 1
        shape = (*_SHAPES, "empty")[code] if code != _BREAK else "full"  # of one query
        found.append((first, last, shape if seen[first] else "empty"))
        first = last
    return found


def _cuts(
    begin: np.ndarray, end: np.ndarray, first: int, last: int, shape: str, pairs: int | None
) -> list[tuple[int, int]]:
    """Bounds of the runs that one run is cut into."""
    parts = -(-(last - first) // LONGEST) if shape == "general" else 1
    bounds = [first + (last - first) * i // parts for i in range(parts + 1)]
    if pairs is not None and shape != "empty":
        keys = max(1, int(end[first:last].max() - begin[first:last].min()))
        step = max(CUT, pairs // keys // CUT * CUT)
        bounds = [x for a, b in pairwise(bounds) for x in range(a, b, step)] + [last]
    return list(pairwise(bounds))


def _run(begin: np.ndarray, end: np.ndarray, a: int, b: int, shape: str) -> Run:
    begin, end = begin[a:b], end[a:b]
    seen = end > begin
    if seen.any():
        keys = slice(int(begin[seen].min()), int(end[seen].max()))
    else:
        keys, shape = slice(0, 0), "empty"
    window = int(end[0] - begin[0]) if shape == "band" else 0
    return Run(slice(a, b), shape, keys, window, begin, end)
