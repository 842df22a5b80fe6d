"""Visible pairs between all shards of a sequence at once, in closed form where there is one.

The cost model asks for the work of every block of every tile on every grid.  Each of these is a
sum over entries of one (shards, shards) matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np

from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.masks import Causal, Full, Mask

SAMPLE = 512  # queries of a shard that are looked at, if all of them would be too many
EXACT = 1 << 27  # queries times shards that take a second or two
LARGE = 512  # shards: the matrices of more take megabytes


def visible_pairs(
    mask: Mask, queries: Distribution, keys: Distribution | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Count the visible pairs between every shard of queries and every shard of keys.

    Parameters
    ----------
    mask : Mask
        `Full` has a closed form, and so has `Causal` in self-attention.  The pairs of other masks
        are counted: all of them if there are no more than `EXACT` queries and shards of keys, and
        otherwise those of a sample, `SAMPLE` queries a shard.
    queries, keys : Distribution
        Default of the keys: the queries' distribution.

    Returns
    -------
    pairs : (shards, shards) int64
        ``pairs[i, j]``: pairs of a query of shard i and a visible key of shard j.
    cut : (shards, shards) int64
        Queries of shard i whose visible keys begin or end strictly inside a run of shard j:
        queries for which a kernel needs a mask.
    """
    keys = queries if keys is None else keys
    return (_large if queries.nshards > LARGE else _small)(mask, queries, keys)


def _visible_pairs(
    mask: Mask, queries: Distribution, keys: Distribution
) -> tuple[np.ndarray, np.ndarray]:
    shards = queries.nshards
    if type(mask) is Full:
        counts = (np.array(x.counts, np.int64) for x in (queries, keys))
        return np.outer(*counts), np.zeros((shards, shards), np.int64)
    if type(mask) is Causal and queries == keys and queries.listed is None:
        return _causal(queries)
    return _counted(mask, queries, keys)


_small, _large = lru_cache(maxsize=64)(_visible_pairs), lru_cache(maxsize=1)(_visible_pairs)


def pairs_of_runs(mask: Mask, queries: list[range], keys: list[range]) -> tuple[int, int]:
    """Visible pairs between runs of queries and of keys, and queries that need a mask.

    As the entries of `visible_pairs`, for runs of consecutive tokens, in order.
    """
    nq, nk = sum(map(len, queries)), sum(map(len, keys))
    if type(mask) is Full or not nq or not nk:
        return nq * nk, 0
    steps = {r.step for r in (*queries, *keys) if len(r) > 1} or {1}
    if type(mask) is not Causal or len(steps) > 1:
        q, k = (
            np.concatenate([np.arange(r.start, r.stop, r.step) for r in x])
            for x in (queries, keys)
        )
        seen = sum(end - begin for begin, end in mask.intervals(q, np.sort(k)))
        return int(np.sum(seen)), int(np.sum((seen > 0) & (seen < nk)))
    q_start, m = np.array([(r.start, len(r)) for r in queries]).T[..., None]
    k_start, n = np.array([(r.start, len(r)) for r in keys]).T
    # Query i of a run sees clip(i + first + 1, 0, n) keys of another run.
    first = (q_start - k_start) // steps.pop()
    area = _stairs(m + first) - _stairs(first) - _stairs(m + first - n) + _stairs(first - n)
    cut = np.maximum(np.minimum(m, n - first - 1) - np.maximum(-first, 0), 0)
    return int(area.sum()), int(cut.sum())


def by_rows(shards: int) -> Iterator[slice]:
    """Rows of a (shards, shards) matrix, few enough at a time for intermediates in caches."""
    step = max(1, (1 << 15) // shards)
    return (slice(first, first + step) for first in range(0, shards, step))


def _causal(distribution: Distribution) -> tuple[np.ndarray, np.ndarray]:
    """Closed form of the staircase: all runs of all shards have the same step."""
    shards = distribution.nshards
    runs = [[s for _, s in distribution.slices(shard)] for shard in range(shards)]
    step = distribution.nshards if distribution.name == "striped" else 1
    pairs, cut = (np.zeros((shards, shards), np.int64) for _ in range(2))
    slots = max(map(len, runs))
    starts, counts = np.zeros((slots, shards), np.int64), np.zeros((slots, shards), np.int64)
    for shard, slices in enumerate(runs):
        for slot, s in enumerate(slices):
            starts[slot, shard], counts[slot, shard] = s.start, len(range(s.start, s.stop, s.step))
    for rows, (q_start, m), (k_start, n) in product(
        by_rows(shards), zip(starts, counts), zip(starts, counts)
    ):
        m_, n_ = m[rows, None], n[None, :]
        # Query i of the run sees clip(i + first + 1, 0, n) keys of the other.
        first = (q_start[rows, None] - k_start[None, :]) // step
        pairs[rows] += _stairs(m_ + first) - _stairs(first)
        pairs[rows] -= _stairs(m_ + first - n_) - _stairs(first - n_)
        cut[rows] += np.maximum(np.minimum(m_, n_ - first - 1) - np.maximum(-first, 0), 0)
    return pairs, cut


def _stairs(x: np.ndarray) -> np.ndarray:
    """Sum of 1, 2, ..., x; 0 for x < 0."""
    x = np.maximum(x, 0)
    return x * (x + 1) // 2


def _counted(
    mask: Mask, queries: Distribution, keys: Distribution
) -> tuple[np.ndarray, np.ndarray]:
    n, shards = queries.seqlen, queries.nshards
    owner = np.zeros(n, np.int64)
    for shard in range(shards):
        for _, where in queries.slices(shard):
            owner[where] = shard
    step = 1 if n * shards <= EXACT else max(1, n // (SAMPLE * shards))
    tokens, owner = np.arange(n)[::step], owner[::step]
    scale = np.array(queries.counts) / np.maximum(1, np.bincount(owner, minlength=shards))
    visible = np.array(mask.visible(tokens)).clip(0, keys.seqlen)
    pairs, cut = (np.zeros((shards, shards), np.int64) for _ in range(2))
    for shard in range(shards):
        before = np.zeros(keys.seqlen + 1, np.int64)  # keys of the shard before each token
        for _, where in keys.slices(shard):
            before[1:][where] = 1
        np.cumsum(before, out=before)
        seen = sum(np.maximum(before[end] - before[begin], 0) for begin, end in visible)
        masked = (seen > 0) & (seen < before[-1])
        for found, x in ((pairs, seen), (cut, masked)):
            found[:, shard] = np.rint(np.bincount(owner, x, shards) * scale)
    return pairs, cut
