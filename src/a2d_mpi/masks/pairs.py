"""Counts of the visible pairs between runs of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from a2d_mpi.masks.stairs import Stairs


def visible_pairs(several: Iterable[Stairs], bounds: np.ndarray) -> np.ndarray:
    """Compute `a2d_mpi.masks.compiled.CompiledMask.pairs`.

    Notes
    -----
    A query with the interval [begin, end) sees ``(x - begin)+ - (x - end)+`` keys below x, where
    ``(y)+ = max(y, 0)``.  A histogram of the ends of the intervals gives the sum over a run of
    queries for all bounds x at once.  The ends of a piece of the mask's stairs lie in one bin.
    """
    runs = len(bounds) - 1
    number = np.zeros(runs * (runs + 2))
    total = np.zeros(runs * (runs + 2))
    for stairs in several:
        x = _cut(stairs, bounds)
        run, size = np.searchsorted(bounds, x.first, side="right") - 1, x.last - x.first
        for token, step, sign in ((x.begin, x.step_begin, 1), (x.end, x.step_end, -1)):
            # These ends of intervals count for all bounds after the token, from `first` on.
            first = run * (runs + 2) + np.searchsorted(bounds, token, side="right")
            sums = size * token + step * size * (size - 1) // 2
            number += sign * np.bincount(first, size, len(number))
            total += sign * np.bincount(first, sums, len(number))
    number, total = (
        np.cumsum(x.reshape(runs, -1), axis=1)[:, : runs + 1] for x in (number, total)
    )
    return np.rint(np.diff(number * bounds - total, axis=1)).astype(np.int64)


def _cut(stairs: Stairs, bounds: np.ndarray) -> Stairs:
    """Cut runs at ascending bounds, and where an end of the interval arrives at a bound."""
    first, last, begin, end, step_begin, step_end = stairs
    cuts = [first]
    for start, step in ((first, 1), (begin, step_begin), (end, step_end)):
        least = np.searchsorted(bounds, start, side="right")
        number = np.searchsorted(bounds, start + step * (last - first)) - least
        number = np.maximum(number, 0)
        run = np.repeat(np.arange(len(first)), number)
        bound = np.arange(len(run)) + np.repeat(least - np.cumsum(number) + number, number)
        cuts.append(first[run] + bounds[bound] - start[run])
    new = np.sort(np.concatenate(cuts), kind="stable")  # faster than np.unique, which hashes
    new = new[np.diff(new, prepend=-1) > 0]
    run = np.searchsorted(first, new, side="right") - 1
    moved = new - first[run]
    return Stairs(
        new,
        np.minimum(last[run], np.append(new[1:], last[-1:])),
        begin[run] + step_begin[run] * moved,
        end[run] + step_end[run] * moved,
        step_begin[run],
        step_end[run],
    )
