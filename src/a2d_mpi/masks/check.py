"""A check of all methods of a mask, for tests."""

from __future__ import annotations

import copy

import numpy as np

from a2d_mpi.core.config import DISTRIBUTIONS
from a2d_mpi.masks.mask import Mask
from a2d_mpi.masks.visible import check_visible, keys_of

_MOST = 4096  # tokens of `check_mask`, which takes seconds then


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
    seen = np.zeros((n, nk), bool)
    for query, intervals in enumerate(keys_of(mask, np.arange(n), nk)):
        for begin, end in intervals:
            seen[query, begin:end] = True
    random = np.random.default_rng(0)
    subsets = [(np.arange(n), np.arange(nk)), (np.arange(n), np.arange(0)), (np.arange(0),) * 2]
    for share in (0.1, 0.5, 0.9):  # of the keys, sorted; queries come in any order
        queries = random.permutation(n)[: 1 + n // 2]
        subsets.append((queries, np.flatnonzero(random.random(nk) < share)))
    for queries, keys in subsets:
        _compare(name, mask, queries, keys, seen[np.ix_(queries, keys)])
    if mask.positional and n == nk:
        late = np.arange(1, n)  # queries whose positions are those of the keys 1, 2, ...
        _compare(f"{name}.aligned", mask.aligned(n - 1, n), late - 1, np.arange(n), seen[1:])


def _compare(name: str, mask: Mask, queries: np.ndarray, keys: np.ndarray, seen: np.ndarray):
    """Raise ValueError if a mask does not show these keys to these queries, (nq, nk) bool."""
    what = f"for {len(queries)} queries and {len(keys)} keys"
    shown = np.zeros(seen.shape, int)
    for begin, end in mask.intervals(queries, keys):
        for row, interval in enumerate(zip(begin.tolist(), end.tolist())):
            if not 0 <= interval[0] <= interval[1] <= len(keys):
                raise ValueError(f"{name}.intervals {what}: {interval} are no positions of keys")
            shown[row, slice(*interval)] += 1
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
