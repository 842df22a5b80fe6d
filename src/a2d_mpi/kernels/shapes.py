"""Mask shapes, and the division of a block into runs of queries with one shape each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from a2d_mpi.kernels.blocks import even
from a2d_mpi.masks.intervals import Interval

TILE = 128  # of cuDNN
LONGEST = 2048  # most queries of a general run, so that they see few keys together
# Launches for masks that vary have these sizes, or multiples of the last one.
SIZES = 1024, 4096, 8192
PAIRS = 1 << 20  # hidden pairs that general launches may add, for fewer sizes

# Shapes by their code: 2 x (step of begin) + (step of end), where steps go from a query to the
# next and are 0 or 1.
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
        The mask shape.

        * "full": all queries see all of `keys`.
        * "causal": the last query sees all of `keys`.  Each earlier query sees one key less at
          the end.
        * "anti-causal": the first query sees all of `keys`.  Each later query sees one key less
          at the beginning.
        * "band": each query sees `window` keys, which move by one key from query to query.
        * "empty": no query sees a key.
        * "general": any other shape.
    keys : slice
        From the first to the last key that any of the queries sees.
    window : int
        Number of keys that each query of a band sees.
    begin, end : (queries,) int64
        Visible keys of these queries, as places among all keys of the block.
    """

    rows: slice
    shape: str
    keys: slice
    window: int
    begin: np.ndarray
    end: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


def launch_size(run: Run) -> tuple[int, int]:
    """Return the queries and keys of the launch for a run of a mask that varies.

    cuDNN builds a graph for each size, which takes seconds, so there are few.  A general launch
    computes its hidden pairs, too.  Other launches get the run's own numbers of queries and keys.
    """
    nq, nk = run.size
    if run.shape == "general":
        nq = max(TILE, 1 << (nq - 1).bit_length())
        return nq, _rounded(nk, max(TILE, PAIRS // nq))
    n = max(nq, nk)
    n = next((size for size in SIZES if n <= size), _rounded(n, SIZES[-1]))
    return n, n


def _rounded(n: int, step: int) -> int:
    return -(-n // step) * step


def runs(interval: Interval, shortest: int = 1, join: bool = False) -> list[Run]:
    """Cut a block into runs of queries with one mask shape each.

    If a mask has several intervals, call this function for each of them.

    Parameters
    ----------
    interval : (begin, end), each (nq,) int
        Visible keys of each query, as places among the keys of the block.
    shortest : int
        Neighbouring runs with fewer queries are joined to a general run, because a launch for each
        would cost more.  So is a shorter band, whose window may be any.
    join : bool
        Whether runs of all shapes but "full" and "empty" become general runs.

    Returns
    -------
    list of Run
        Runs in the order of the queries.  They cover all queries.  General runs have at most
        `LONGEST` queries.
    """
    begin, end = (np.asarray(x, np.int64) for x in interval)
    spans: list[tuple[int, int, str]] = []
    for first, last, shape in _steps(begin, end):
        short_band = shape == "band" and last - first < shortest
        if short_band or (join and shape not in ("full", "empty")):
            shape = "general"
        if spans and (last - first < shortest or shape == "general"):
            a, b, before = spans[-1]
            if before == "general" or b - a < shortest:
                spans[-1] = (a, last, "general")
                continue
        spans.append((first, last, shape))
    return [
        _run(begin, end, a, b, shape)
        for first, last, shape in spans
        for a, b in even(first, last, LONGEST if shape == "general" else last - first)
    ]


def _steps(begin: np.ndarray, end: np.ndarray) -> list[tuple[int, int, str]]:
    """Return the longest runs of simple shapes, as (first, last + 1, shape)."""
    nq, seen = len(begin), end > begin
    by = np.stack([np.diff(begin), np.diff(end)])
    codes = by[0] * 2 + by[1]
    codes[((by < 0) | (by > 1)).any(axis=0) | (seen[1:] != seen[:-1])] = _BREAK
    codes[~seen[1:] & ~seen[:-1]] = _EMPTY  # neighbours without visible keys are in one run
    cuts = np.append(np.flatnonzero(np.diff(codes)) + 1, nq - 1)  # where the code changes
    spans, first = [], 0
    while first < nq:
        code, last = int(codes[first]) if first < nq - 1 else _BREAK, first + 1
        if code != _BREAK:
            last = int(cuts[np.searchsorted(cuts, first, side="right")]) + 1
        shape = (*_SHAPES, "empty")[code] if code != _BREAK else "full"  # a single query
        spans.append((first, last, shape if seen[first] else "empty"))
        first = last
    return spans


def _run(begin: np.ndarray, end: np.ndarray, a: int, b: int, shape: str) -> Run:
    begin, end = begin[a:b], end[a:b]
    seen = end > begin
    if seen.any():
        keys = slice(int(begin[seen].min()), int(end[seen].max()))
    else:
        keys, shape = slice(0, 0), "empty"
    window = int(end[0] - begin[0]) if shape == "band" else 0
    return Run(slice(a, b), shape, keys, window, begin, end)
