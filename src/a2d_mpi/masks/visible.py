"""A check of what the method `visible` of a mask returns, before it is used."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from a2d_mpi.masks.intervals import tidy
from a2d_mpi.masks.mask import Aligned, Mask

_MANY = 1 << 16  # queries whose intervals are checked, in milliseconds
_FEW = 64  # queries that are asked for again, in another order


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
    known = dict(zip(tokens.tolist(), keys_of(mask, tokens, seqlen_kv)))
    for others in (tokens[::-2], tokens[:0]):  # in another order; of a shard without tokens
        for query, keys in zip(others.tolist(), keys_of(mask, others, seqlen_kv)):
            if keys != known[query]:
                name = type(mask.mask if isinstance(mask, Aligned) else mask).__name__
                raise ValueError(
                    f"{name}.visible: query {query} sees the keys {known[query]}, "
                    f"and {keys} if other queries are asked for or in another order"
                )


def _spread(seqlen: int, number: int) -> np.ndarray:
    """At most so many tokens of a sequence, from the first to the last: (n,) int64."""
    return np.unique(np.linspace(0, seqlen - 1, min(number, seqlen)).astype(np.int64))


def keys_of(mask: Mask, q_tokens: np.ndarray, nk: int) -> list[list[tuple[int, int]]]:
    """Intervals of visible keys of each query, as few as possible and in order."""
    pairs = tidy(zip(*mask.checked(q_tokens, nk)))
    rows = zip(*(zip(begin.tolist(), end.tolist()) for begin, end in pairs))
    return [[(begin, end) for begin, end in row if begin < end] for row in rows]
