"""Required rows: the tokens of a shard that are in a visible pair with tokens of other shards.

A rank needs only the keys that its queries see, and only the queries that see its keys.  So
traffic follows the mask.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import numpy as np

from a2d_mpi.masks.compiled import CompiledMask
from a2d_mpi.masks.intervals import Runs, members, union
from a2d_mpi.masks.mask import Full
from a2d_mpi.sharding.distribution import Distribution
from a2d_mpi.sharding.progressions import concatenated

_TOGETHER = 1 << 18  # pairs of stairs and runs of keys that are processed together


class Visibility:
    """Visibility between all shards of queries and all shards of keys.

    Programs ask for the same rows again and again, so all answers are kept.

    Parameters
    ----------
    seen : CompiledMask
    queries, keys : Distribution
        Distributions with the same number of shards.

    Attributes
    ----------
    required : callable
        ``required(of_keys, owner, others)`` returns the places in the owner's shard of the tokens
        that other shards require: with `of_keys` its keys that their queries see, otherwise its
        queries that see their keys.  `others` is a hashable collection of shards, each once; the
        hash of a range or a frozenset is fastest.
    """

    def __init__(self, seen: CompiledMask, queries: Distribution, keys: Distribution) -> None:
        self._seen, self._shards = seen, (queries, keys)
        self.required = cache(self._places)
        self._of_shards, self._of_shard = cache(self._tokens_of_all), cache(self._tokens)

    def _places(self, of_keys: bool, owner: int, others: Collection[int]) -> Runs:
        shards = self._shards[of_keys]
        if not others:
            return ()
        if type(self._seen.mask) is Full:
            count = shards.counts[owner]
            return ((0, count),) if count else ()
        return shards.places(owner, self._of_shards(of_keys, others))

    def _tokens_of_all(self, of_keys: bool, others: Collection[int]) -> Runs:
        return union(self._of_shard(of_keys, other) for other in others)

    def _tokens(self, of_keys: bool, other: int) -> Runs:
        """Return the keys that queries of a shard see, or the queries that see its keys."""
        own = [r for r in self._shards[not of_keys].runs(other) if r]
        find = _keys_seen if of_keys else _queries_seeing
        return find(self._seen, _bounds(own))


def sees(mask: CompiledMask, queries: list[range], keys: list[range]) -> bool:
    """Return True if any of the queries sees any of the keys."""
    seen = _keys_seen(mask, _bounds(queries))
    return any(members(r, seen) for r in keys)


def _keys_seen(mask: CompiledMask, queries: np.ndarray) -> Runs:
    """Return the keys that any query in the ascending runs `queries`, (n, 2) int64, sees."""
    seen, (first, last) = [], queries.T
    for x in mask.stairs:
        # Find the stairs that contain a query of each run.
        least = np.searchsorted(x.last, first, side="right")
        number = np.maximum(np.searchsorted(x.first, last) - least, 0)
        run = np.repeat(np.arange(len(first)), number)
        stair = np.arange(len(run)) + np.repeat(least - np.cumsum(number) + number, number)
        start, begin, end = x.first[stair], x.begin[stair], x.end[stair]
        begin = begin + x.step_begin[stair] * np.maximum(first[run] - start, 0)
        final = np.minimum(last[run], x.last[stair]) - 1
        seen.append((begin, end + x.step_end[stair] * (final - start)))
    return _union(seen)


def _queries_seeing(mask: CompiledMask, keys: np.ndarray) -> Runs:
    """Return the queries that see any key in the runs `keys`, (n, 2) int64."""
    seeing = []
    for x in mask.stairs:
        several = max(1, _TOGETHER // max(1, len(x.first)))
        for i in range(0, len(keys), several):
            begin, end = keys[i : i + several, :, None].transpose(1, 0, 2)  # (runs, 1)
            # Find the first query whose interval ends after the first key, and the first query
            # whose interval begins after all keys.
            late, early = begin - x.end + 1, end - x.begin
            late = np.where(x.step_end | (late <= 0), np.maximum(late, 0), mask.seqlen)
            early = np.where(x.step_begin | (early <= 0), early, mask.seqlen)
            run = x.first + late, np.minimum(x.last, x.first + early)
            seeing.append(tuple(y.ravel() for y in run))
    return _union(seeing)


def _bounds(runs: list[range]) -> np.ndarray:
    """Return the integers of progressions as runs of consecutive ones, ascending, (n, 2) int64."""
    if any(r.step > 1 for r in runs):
        tokens = np.sort(concatenated(runs), kind="stable")
        return np.stack([tokens, tokens + 1], axis=1)
    return np.array(sorted((r.start, r.stop) for r in runs), np.int64).reshape(-1, 2)


def _union(several: list[tuple[np.ndarray, np.ndarray]]) -> Runs:
    """Return the union of runs [begin, end); some of these runs may be empty."""
    begin, end = (np.concatenate(x) for x in zip(*several or [((), ())]))
    order = np.flatnonzero(end > begin)
    if not len(order):
        return ()
    order = order[np.argsort(begin[order], kind="stable")]
    begin, end = begin[order], np.maximum.accumulate(end[order])
    apart = begin[1:] > end[:-1]
    return tuple(zip(begin[np.append(True, apart)].tolist(), end[np.append(apart, True)].tolist()))
