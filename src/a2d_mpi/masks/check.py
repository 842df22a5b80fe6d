"""Checks of masks: of what `visible` returns, before it is used; of all methods, for tests."""

from __future__ import annotations

import copy
from functools import lru_cache

import numpy as np

from a2d_mpi.core.config import DISTRIBUTIONS
from a2d_mpi.masks.intervals import tidy
from a2d_mpi.masks.mask import Aligned, IntervalMask, Mask

_MANY = 1 << 16  # queries whose intervals are checked, in milliseconds
_FEW = 64  # queries that are asked for again, in another order
_MOST = 4096  # tokens of `check_mask`, which takes seconds then


def check_visible(mask: Mask, seqlen: int, seqlen_kv: int) -> None:
    """Check what the method `visible` of a mask returns for up to 65536 queries.  Remembered.

    `Mask.digest` checks the intervals of all queries.

    Parameters
    ----------
    mask : Mask
        Aligned for both sequences.
    seqlen, seqlen_kv : int
        Queries and keys.

    Raises
    ------
    ValueError
        If the mask cannot be hashed, or its `visible` does not return disjoint intervals for every
        query, whatever the other queries are.
    """
    try:
        _check_visible(mask, seqlen, seqlen_kv)
    except TypeError as error:  # `visible` raises none here: `Mask.checked` sees to that
        raise ValueError(
            f"{type(mask).__name__} cannot be hashed ({error}): make it a frozen dataclass of "
            "numbers; one with arrays derives from a2d_mpi.masks.mask.ArrayMask"
        ) from None


@lru_cache(maxsize=64)
def _check_visible(mask: Mask, seqlen: int, seqlen_kv: int) -> None:
    mask.checked(_spread(seqlen, _MANY), seqlen_kv)
    tokens = _spread(seqlen, _FEW)
    known = dict(_keys_of(mask, tokens, seqlen_kv))
    for others in (tokens[::-2], tokens[:0]):  # in another order; of a shard without tokens
        for query, keys in _keys_of(mask, others, seqlen_kv):
            if keys != known[query]:
                name = type(mask.mask if isinstance(mask, Aligned) else mask).__name__
                raise ValueError(
                    f"{name}.visible: query {query} sees the keys {known[query]}, "
                    f"and {keys} if other queries are asked for or in another order"
                )


def _spread(seqlen: int, number: int) -> np.ndarray:
    """At most so many tokens of a sequence, from the first to the last: (n,) int64."""
    return np.unique(np.linspace(0, seqlen - 1, min(number, seqlen)).astype(np.int64))


def _keys_of(mask: Mask, q_tokens: np.ndarray, nk: int) -> list[tuple[int, list]]:
    """Queries with their intervals of visible keys, as few as possible and in order."""
    ends = np.array(tidy(zip(*mask.checked(q_tokens, nk))))  # (intervals, 2, nq)
    return [
        (query, [x for x in of_query if x[0] < x[1]])
        for query, of_query in zip(q_tokens.tolist(), ends.transpose(2, 0, 1).tolist())
    ]


def check_mask(mask: Mask, seqlen: int, seqlen_kv: int | None = None) -> None:
    """Check a mask of one's own on a short sequence, every pair of a query and a key.

    For tests.  A plan checks the intervals that `visible` returns; this compares all other methods
    with them, too: `dense`, `intervals` and `area` on subsets of queries and keys, `aligned`,
    comparison and hash.

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
    if not (1 <= n <= _MOST and 1 <= nk <= _MOST):
        raise ValueError(f"check_mask takes 1 to {_MOST} tokens, got {n} queries and {nk} keys")
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
        raise ValueError(f"{name}: an equal mask has another hash or digest")
    q, k = np.arange(n), np.arange(nk)
    seen = IntervalMask(*mask.checked(q, nk)).dense(q, k)
    random = np.random.default_rng(0)
    subsets = [(q, k), (q, k[:0]), (q[:0], k[:0])]
    for share in (0.1, 0.5, 0.9):  # of the keys, sorted; queries come in any order
        subsets.append((random.permutation(n)[: 1 + n // 2], k[random.random(nk) < share]))
    for queries, keys in subsets:
        _compare(name, mask, queries, keys, seen[np.ix_(queries, keys)])
    if mask.positional and n == nk:  # the later queries, whose positions are those of keys
        _compare(f"{name}.aligned", mask.aligned(n - 1, n), q[:-1], k, seen[1:])


def _compare(
    name: str, mask: Mask, queries: np.ndarray, keys: np.ndarray, seen: np.ndarray
) -> None:
    """Raise ValueError if a mask does not show these keys to these queries, (nq, nk) bool."""
    what = f"for {len(queries)} queries and {len(keys)} keys"
    shown, positions = np.zeros(seen.shape, int), np.arange(len(keys))
    for begin, end in mask.intervals(queries, keys):
        if not ((begin >= 0) & (begin <= end) & (end <= len(keys))).all():
            raise ValueError(f"{name}.intervals {what} are no positions of keys")
        shown += (positions >= begin[:, None]) & (positions < end[:, None])
    for method, found in (("intervals", shown), ("dense", np.asarray(mask.dense(queries, keys)))):
        if found.shape != seen.shape:
            raise ValueError(f"{name}.{method} {what} has shape {found.shape}, not {seen.shape}")
        wrong = np.argwhere(found != seen)
        if len(wrong):
            row, column = wrong[0]
            raise ValueError(
                f"{name}.{method} {what} shows key {keys[column]} to query {queries[row]} "
                f"{int(found[row, column])} times, visible {int(seen[row, column])} times"
            )
    if (area := mask.area(queries, keys)) != seen.sum():
        raise ValueError(f"{name}.area {what} is {area}, the visible pairs are {seen.sum()}")
