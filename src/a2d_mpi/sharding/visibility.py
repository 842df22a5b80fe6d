"""Required rows: the tokens of a shard that some query or key of other shards sees.

A rank needs of a shard only the keys that its queries see, and only the queries that see its
keys.  So what travels follows the mask.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import numpy as np

from a2d_mpi.masks.intervals import Runs, queries_per_key, runs_of, union
from a2d_mpi.masks.mask import Causal, Full, Mask
from a2d_mpi.sharding.distribution import Distribution


@lru_cache(maxsize=8)
def visibility(mask: Mask, queries: Distribution, keys: Distribution) -> Visibility:
    """The visibility between all shards; kept, as the schedules of all ranks ask for it."""
    return Visibility(mask, queries, keys)


class Visibility:
    """Visibility between all shards of queries and all shards of keys.

    Parameters
    ----------
    mask : Mask
    queries, keys : Distribution
        Each with the same number of shards.
    """

    def __init__(self, mask: Mask, queries: Distribution, keys: Distribution) -> None:
        self._mask, self._shards = mask, (queries, keys)
        self._of_shard: dict[tuple[bool, int], Runs] = {}
        self._of_shards: dict[tuple[bool, Collection[int]], Runs] = {}
        self._required: dict[tuple[bool, int, Collection[int]], Runs] = {}
        self._intervals: np.ndarray | None = None

    def required(self, of_keys: bool, owner: int, others: Collection[int]) -> Runs:
        """Places in the owner's shard of its tokens that see, or are seen by, other shards.

        Parameters
        ----------
        of_keys : bool
            True: keys of the owner that queries of the others see.  False: queries of the owner
            that see keys of the others.
        owner : int
        others : hashable collection of int
            Each rank once; a range or a frozenset is looked up fastest.
        """
        key = of_keys, owner, others
        if (found := self._required.get(key)) is None:
            found = self._required[key] = self._places(*key)
        return found

    def _places(self, of_keys: bool, owner: int, others: Collection[int]) -> Runs:
        shards = self._shards[of_keys]
        if not others:
            return ()
        if type(self._mask) is Full:
            count = shards.counts[owner]
            return ((0, count),) if count else ()
        key = of_keys, others
        if key not in self._of_shards:
            several = [x for p in others for x in self._tokens(of_keys, p)]
            if type(self._mask) is Causal and several:  # all begin at 0, or all end at n
                begins, ends = zip(*several)
                several = [(min(begins), max(ends))]
            self._of_shards[key] = union([several])
        return shards.places(owner, self._of_shards[key])

    def _tokens(self, of_keys: bool, other: int) -> Runs:
        """Keys that queries of a shard see, or queries that see keys of a shard."""
        key = of_keys, other
        if key not in self._of_shard:
            self._of_shard[key] = self._keys_of(other) if of_keys else self._queries_of(other)
        return self._of_shard[key]

    def _keys_of(self, shard: int) -> Runs:
        n = self._shards[1].seqlen
        if type(self._mask) is Causal:  # no query sees more than the last one
            last = max((r[-1] for r in self._shards[0].runs(shard) if r), default=-1)
            return ((0, min(last + 1, n)),) if last >= 0 else ()
        return runs_of(queries_per_key(self._mask.visible(self._shards[0].tokens(shard)), n) > 0)

    def _queries_of(self, shard: int) -> Runs:
        n, nk = (x.seqlen for x in self._shards)
        if type(self._mask) is Causal:  # a query that sees any of the keys sees the first
            first = min((r[0] for r in self._shards[1].runs(shard) if r), default=n)
            return ((first, n),) if first < n else ()
        if self._intervals is None:
            found = self._mask.visible(np.arange(n))
            self._intervals = np.array(found).clip(0, nk)  # (intervals, 2, n)
        keys_before = np.zeros(nk + 1, np.int32)
        keys_before[self._shards[1].tokens(shard) + 1] = 1
        keys_before = np.cumsum(keys_before, dtype=np.int32)
        sees = np.zeros(n, bool)
        for begin, end in self._intervals:
            sees |= keys_before[end] > keys_before[begin]
        return runs_of(sees)
