"""Checks of the intervals that a mask returns, and of all methods of a mask (for tests)."""

from __future__ import annotations

import copy
from functools import lru_cache

import numpy as np

from a2d_mpi.core.config import DISTRIBUTIONS
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.intervals import tidy
from a2d_mpi.masks.mask import Aligned, Mask
from a2d_mpi.masks.stairs import stairs_of

_REPEATED = 64  # queries that are passed again, in another order
_MOST_TOKENS = 4096  # most tokens for `check_mask`, which then takes seconds


def check_visible(mask: Mask, seqlen: int, seqlen_kv: int) -> None:
    """Check the intervals that `Mask.visible` returns; the result is cached.

    Parameters
    ----------
    mask : Mask
        A mask from `Mask.aligned`.
    seqlen, seqlen_kv : int
        Queries and keys.

    Raises
    ------
    ValueError
        If the mask cannot be hashed, if intervals of a query overlap, or if the intervals of a
        query depend on the other queries of the call.
    """
    try:
        _check_visible(mask, seqlen, seqlen_kv)
    except TypeError as error:  # from the hash: `Mask.checked` catches all others
        raise ValueError(
            f"{type(mask).__name__} cannot be hashed ({error}): make it a frozen dataclass of "
            "numbers, or derive it from a2d_mpi.masks.arrays.ArrayMask if it holds arrays"
        ) from None


@lru_cache(maxsize=64)
def _check_visible(mask: Mask, seqlen: int, seqlen_kv: int) -> None:
    stairs_of(mask, seqlen, seqlen_kv)
    tokens = _spread(seqlen, _REPEATED)
    expected = dict(_keys_of(mask, tokens, seqlen_kv))
    for others in (tokens[::-2], tokens[:0]):  # another order; no tokens, as in an empty shard
        for query, keys in _keys_of(mask, others, seqlen_kv):
            if keys != expected[query]:
                name = type(mask.mask if isinstance(mask, Aligned) else mask).__name__
                raise ValueError(
                    f"{name}.visible: query {query} sees the keys {expected[query]} in one call "
                    f"and {keys} in a call with other queries or in another order"
                )


def _spread(seqlen: int, number: int) -> np.ndarray:
    """Return at most `number` evenly spread tokens of a sequence, (n,) int64."""
    return np.arange(number := min(number, seqlen)) * (seqlen - 1) // max(number - 1, 1)


def _keys_of(mask: Mask, q_tokens: np.ndarray, nk: int) -> list[tuple[int, list]]:
    """Return each query with its intervals of visible keys, tidy and in order."""
    ends = np.array(tidy(zip(*mask.checked(q_tokens, nk))))  # (intervals, 2, nq)
    return [
        (query, [x for x in of_query if x[0] < x[1]])
        for query, of_query in zip(q_tokens.tolist(), ends.transpose(2, 0, 1).tolist())
    ]


def check_mask(mask: Mask, seqlen: int, seqlen_kv: int | None = None) -> None:
    """Check every (query, key) pair of a user's mask on a short sequence, for tests.

    A plan checks only the intervals that `visible` returns.  This function also compares the other
    methods with these intervals: `dense`, `intervals` and `area` on subsets of queries and keys,
    `aligned`, comparison and hash.

    Parameters
    ----------
    mask : Mask
    seqlen, seqlen_kv : int
        Queries and keys, at most 4096.  Default: as many keys as queries.

    Raises
    ------
    ValueError
        If the mask does not fit the sequence, or a method contradicts `visible`.
    """
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, got {mask!r}")
    n, nk = seqlen, seqlen if seqlen_kv is None else seqlen_kv
    if not (1 <= n <= _MOST_TOKENS and 1 <= nk <= _MOST_TOKENS):
        raise ValueError(
            f"check_mask takes 1 to {_MOST_TOKENS} tokens, got {n} queries and {nk} keys"
        )
    name, mask = type(mask).__name__, mask.aligned(n, nk)
    check_visible(mask, n, nk)
    digest = mask.digest(n, nk)
    if mask.default_distribution not in DISTRIBUTIONS:
        raise ValueError(
            f"{name}.default_distribution must be one of {', '.join(DISTRIBUTIONS)}, "
            f"got {mask.default_distribution!r}"
        )
    twin = copy.copy(mask)
    if twin == mask and (hash(twin), twin.digest(n, nk)) != (hash(mask), digest):
        raise ValueError(f"{name}: a copy is equal to the mask, but its hash or digest differs")
    q, k = np.arange(n), np.arange(nk)
    every = IntervalMask(*mask.checked(q, nk))
    if every.digest(n, nk) != digest:
        raise ValueError(f"{name}.corners leaves out a query at which an interval turns")
    seen = every.dense(q, k)
    random = np.random.default_rng(0)
    subsets = [(q, k), (q, k[:0]), (q[:0], k[:0])]
    for share in (0.1, 0.5, 0.9):  # of the keys, which are sorted; queries may have any order
        subsets.append((random.permutation(n)[: 1 + n // 2], k[random.random(nk) < share]))
    for queries, keys in subsets:
        _compare(name, mask, queries, keys, seen[np.ix_(queries, keys)])
    if mask.positional and n == nk:  # all queries but the first, aligned with the end of the keys
        _compare(f"{name}.aligned", mask.aligned(n - 1, n), q[:-1], k, seen[1:])


def _compare(
    name: str, mask: Mask, queries: np.ndarray, keys: np.ndarray, seen: np.ndarray
) -> None:
    """Raise ValueError if the methods of a mask contradict `seen`, (nq, nk) bool."""
    what = f"for {len(queries)} queries and {len(keys)} keys"
    shown, positions = np.zeros(seen.shape, int), np.arange(len(keys))
    for begin, end in mask.intervals(queries, keys):
        if not ((begin >= 0) & (begin <= end) & (end <= len(keys))).all():
            raise ValueError(f"{name}.intervals {what} must be in [0, {len(keys)}], some are not")
        shown += (positions >= begin[:, None]) & (positions < end[:, None])
    dense = np.asarray(mask.dense(queries, keys))
    for method, counts in (("intervals", shown), ("dense", dense)):
        if counts.shape != seen.shape:
            raise ValueError(
                f"{name}.{method} {what} must have shape {seen.shape}, got {counts.shape}"
            )
        wrong = np.argwhere(counts != seen)
        if len(wrong):
            row, column = wrong[0]
            raise ValueError(
                f"{name}.{method} {what} shows key {keys[column]} to query {queries[row]} "
                f"{int(counts[row, column])} times, but visible shows it "
                f"{int(seen[row, column])} times"
            )
    if (area := mask.area(queries, keys)) != seen.sum():
        raise ValueError(f"{name}.area {what} is {area}, but {seen.sum()} pairs are visible")
