"""Mask shapes: a block cut into runs of queries, for kernels without a general mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from a2d_mpi.core.masks import Interval


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive queries that see one mask shape.

    Attributes
    ----------
    rows : slice
        The queries.
    shape : str
        The mask shape.  "full": all queries see the same keys.  "causal": the last query sees all
        of `keys`, each one before it one key fewer.  "band": like causal, and each query sees
        `window` keys.  "general": any other shape, the empty one included.
    keys : slice
        The keys that any of the queries sees; empty for a general shape.
    window : int
        Keys that each query sees, for a band.
    intervals : tuple of (begin, end)
        Visible keys of these queries, as positions among all keys of the block.
    """

    rows: slice
    shape: str
    keys: slice
    window: int
    intervals: tuple[Interval, ...]


def runs(intervals: tuple[Interval, ...], shortest: int = 1) -> list[Run]:
    """Cut a block into runs of queries, each of one mask shape.

    Kernels without a general mask compute runs of simple shapes.

    Parameters
    ----------
    intervals : tuple of (begin, end), each (nq,) int
        Visible keys of each query, as positions among the keys of the block.
    shortest : int
        Neighbouring runs of fewer queries make one general run: a launch each would cost more.
    """
    nq = len(intervals[0][0])
    begin, end = (np.asarray(x, np.int64) for x in intervals[0])
    # The step from each query to the next: none, the end by one, or both ends by one.
    step = np.diff(begin) * 4 + np.diff(end)
    shapes = {0: "full", 1: "causal", 5: "band"}
    step[(np.abs(np.diff(begin)) > 1) | ~np.isin(step, list(shapes))] = -1
    simple = end > begin
    for other_begin, other_end in intervals[1:]:
        simple &= other_end <= other_begin
    step[simple[1:] != simple[:-1]] = -1
    step[~simple[1:] & ~simple[:-1]] = 9  # neighbours of no simple shape stay together
    cuts = np.flatnonzero(np.diff(step)) + 1  # places where the step changes
    found: list[tuple[int, int, str]] = []
    first = 0
    while first < nq:
        code = step[first] if first < nq - 1 else 0
        last = first + 1
        if code != -1 and first < nq - 1:
            following = np.searchsorted(cuts, first, side="right")
            last = (int(cuts[following]) if following < len(cuts) else nq - 1) + 1
        shape = shapes.get(int(code), "full") if simple[first] else "general"
        short = last - first < shortest
        if found and (short or shape == "general"):
            a, b, before = found[-1]
            if before == "general" or b - a < shortest:
                found[-1] = (a, last, "general")
                first = last
                continue
        found.append((first, last, shape))
        first = last
    return [
        Run(
            slice(a, b),
            shape,
            slice(int(begin[a]), int(end[b - 1])) if shape != "general" else slice(0, 0),
            int(end[a] - begin[a]) if shape == "band" else 0,
            tuple((x[a:b], y[a:b]) for x, y in intervals),
        )
        for a, b, shape in found
    ]
