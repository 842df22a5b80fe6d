"""Counts of visible pairs between runs of queries and runs of keys, in closed form if possible."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from a2d_mpi.masks.intervals import keys_per_query, queries_per_key
from a2d_mpi.masks.mask import Causal, Full, Mask
from a2d_mpi.sharding.distribution import Distribution
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


def first_tokens(
    mask: Mask,
    shards: Distribution,
    others: Distribution,
    shard: int,
    owners: tuple[int, ...],
    of_keys: bool,
    share: float,
) -> int:
    """Return how many first tokens of a shard have a share of its visible pairs.

    Parameters
    ----------
    mask : Mask
    shards, others : Distribution
        Distributions of this side and of the other side: of keys and queries, if `of_keys`.
    shard : int
    owners : tuple of int
        Shards of the other side; only pairs with their tokens count.
    of_keys : bool
        Whether the tokens of the shard are keys; otherwise they are queries.
    share : float
        The share, from 0 to 1.
    """
    n = shards.counts[shard]
    if type(mask) is Full:  # a closed form is far faster, also for causal masks
        across = sum(others.counts[x] for x in owners)
        return bisect_left(range(n), share * (n * across), key=lambda i: (i + 1) * across)
    if type(mask) is Causal:
        return causal_share(shards.runs(shard), _runs_of(others, owners), of_keys, share)
    own, across = shards.tokens(shard), _tokens_of(others, owners)
    if of_keys:
        pairs = queries_per_key(mask.intervals(across, own), n)  # (keys,)
    else:
        pairs = keys_per_query(mask.intervals(own, across))  # (queries,)
    return int(np.searchsorted(np.cumsum(pairs), share * pairs.sum()))


@lru_cache(maxsize=256)
def _runs_of(shards: Distribution, owners: tuple[int, ...]) -> list[range]:
    """Return the tokens of several shards as progressions, shard by shard."""
    return [r for p in owners for r in shards.runs(p) if r]


@lru_cache(maxsize=256)
def _tokens_of(shards: Distribution, owners: tuple[int, ...]) -> np.ndarray:
    return np.sort(concatenated(_runs_of(shards, owners)))


def causal_share(
    own: Sequence[range], others: Sequence[range], of_keys: bool, share: float
) -> int:
    """Return the place in a shard at which its first tokens reach a share of its visible pairs.

    Parameters
    ----------
    own, others : sequence of range
        Tokens of the shard, and tokens on the other side, under a causal mask.  All ranges have
        the same step.
    of_keys : bool
        Whether the tokens of the shard are keys; otherwise they are queries.
    share : float
        The share, from 0 to 1.
    """
    starts, counts = np.array([(r.start, len(r)) for r in own]).T[..., None]  # (runs, 1)
    theirs = np.array([(r.start, len(r)) for r in others]).reshape(-1, 2).T  # (2, runs)
    before, n = np.cumsum(counts)[:, None] - counts, int(counts.sum())

    def pairs(tokens: np.ndarray) -> np.ndarray:
        """Return the visible pairs of the first `tokens` tokens, (numbers,)."""
        first = np.clip(tokens[:, None, None] - before, 0, counts)  # (numbers, runs, 1)
        both = (*theirs, starts, first) if of_keys else (starts, first, *theirs)
        return stairs(*both, own[0].step)[0].sum(axis=(1, 2))

    target = share * int(pairs(np.array([n]))[0])
    stride = math.isqrt(n)  # a coarse search, then a fine search
    coarse = stride * int(np.searchsorted(pairs(np.arange(stride, n, stride)), target))
    return coarse + int(np.searchsorted(pairs(np.arange(coarse + 1, coarse + stride)), target))


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
