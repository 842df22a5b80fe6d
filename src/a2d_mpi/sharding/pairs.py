"""Counts of visible pairs between runs of queries and runs of keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from a2d_mpi.masks.compiled import CompiledMask, Stairs
from a2d_mpi.masks.intervals import keys_per_query
from a2d_mpi.masks.mask import Causal, Full, Mask
from a2d_mpi.sharding.progressions import concatenated

Calls = Sequence[tuple[Sequence[range], Sequence[range]]]  # runs of queries and of keys


def pairs_of_runs(mask: Mask, calls: Calls) -> np.ndarray:
    """Count the visible pairs of kernel calls, and the queries that need a mask.

    Parameters
    ----------
    mask : Mask
    calls : sequence
        For each kernel call the runs of its queries and the runs of its keys, in order.

    Returns
    -------
    (2, calls) int64
        Visible pairs, and queries that see some keys but not all.  A kernel needs a mask for
        these queries.
    """
    counts = np.zeros((2, len(calls)), np.int64)
    stairs: list[int] = []  # calls whose pairs have a closed form
    for i, (queries, keys) in enumerate(calls):
        nq, nk = sum(map(len, queries)), sum(map(len, keys))
        if type(mask) is Full or not nq or not nk:
            counts[0, i] = nq * nk
        elif type(mask) is Causal and len({r.step for r in (*queries, *keys) if len(r) > 1}) < 2:
            stairs.append(i)
        else:
            q, k = concatenated(queries), concatenated(keys)
            seen = keys_per_query(mask.intervals(q, np.sort(k)))  # (queries,)
            counts[:, i] = np.sum(seen), np.sum((seen > 0) & (seen < nk))
    if stairs:
        counts[:, stairs] = _pairs_of_stairs([calls[i] for i in stairs])
    return counts


def _pairs_of_stairs(calls: Calls) -> np.ndarray:
    """Compute `pairs_of_runs` for causal calls whose runs all have the same step."""
    nq, nk = (np.array([len(call[side]) for call in calls]) for side in (0, 1))
    columns = []
    for side in (0, 1):
        runs = [r for call in calls for r in call[side]]
        columns.append(np.array([(r.start, len(r), r.step) for r in runs]).T)
    # Combine every run of queries of a call with every run of keys of the call.
    call = np.repeat(np.arange(len(calls)), nq * nk)
    ends = np.cumsum(nq * nk)
    place = np.arange(ends[-1]) - (ends - nq * nk)[call]
    q_start, m, q_step = columns[0][:, (np.cumsum(nq) - nq)[call] + place // nk[call]]
    k_start, n, k_step = columns[1][:, (np.cumsum(nk) - nk)[call] + place % nk[call]]
    step = np.where(m > 1, q_step, np.where(n > 1, k_step, 1))
    both = stairs(q_start, m, k_start, n, step)
    sums = np.zeros((2, len(both[0]) + 1), np.int64)
    np.cumsum(both, axis=1, out=sums[:, 1:])
    return sums[:, ends] - sums[:, ends - nq * nk]


def stairs(q_start, m, k_start, n, step) -> tuple[np.ndarray, np.ndarray]:
    """Return the visible pairs of causal runs of m queries and n keys.

    Also return the number of queries that need a mask: they see some keys but not all.  The arrays
    broadcast.
    """
    # Query i of a run sees clip(i + first + 1, 0, n) keys of another run.
    first = (q_start - k_start) // step
    area = _stairs(m + first) - _stairs(first) - _stairs(m + first - n) + _stairs(first - n)
    return area, np.maximum(np.minimum(m, n - first - 1) - np.maximum(-first, 0), 0)


def _stairs(x: np.ndarray) -> np.ndarray:
    """Return the sum 1 + 2 + ... + x; 0 for x < 0."""
    x = np.maximum(x, 0)
    return x * (x + 1) // 2


def visible_pairs(seen: CompiledMask, bounds: np.ndarray) -> np.ndarray:
    """Count the visible pairs of every run of queries with every run of keys.

    Parameters
    ----------
    seen : CompiledMask
    bounds : (runs + 1,) int64
        Run i is the tokens ``[bounds[i], bounds[i + 1])``.  The first bound is 0, the last one the
        number of queries and of keys.

    Returns
    -------
    (runs, runs) int64

    Notes
    -----
    A query with the interval [begin, end) sees ``(x - begin)+ - (x - end)+`` keys below x, where
    ``(y)+ = max(y, 0)``.  A histogram of the ends of the intervals gives the sum over a run of
    queries for all bounds x at once.  The ends of a piece of the mask's stairs lie in one bin.
    """
    runs = len(bounds) - 1
    number = np.zeros(runs * (runs + 2))
    total = np.zeros(runs * (runs + 2))
    for stairs in seen.stairs:
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
