"""Masks as stairs: runs of queries whose intervals of keys move by equal steps.

A causal mask is one run, and packed causal documents are one run for each document.  So what
follows from the stairs of a mask needs no array of all tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from a2d_mpi.masks.intervals import tidy

if TYPE_CHECKING:
    from a2d_mpi.masks.mask import Mask


class Stairs(NamedTuple):
    """Runs of queries whose intervals of keys move by equal steps from query to query.

    Attributes
    ----------
    first, last : (n,) int64
        The queries of each run are ``[first, last)``, in ascending order.
    begin, end : (n,) int64
        The interval of keys that the first query sees; it is not empty.
    step_begin, step_end : (n,) int64
        Growth of `begin` and `end` from one query to the next, 0 or 1.
    """

    first: np.ndarray
    last: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    step_begin: np.ndarray
    step_end: np.ndarray


@lru_cache(maxsize=2)
def stairs_of(mask: Mask, seqlen: int, seqlen_kv: int) -> list[Stairs]:
    """Return the visible pairs of a mask as stairs, for each of the intervals of a query.

    Masks with the same visible pairs have the same stairs.

    Raises
    ------
    ValueError
        As in `Mask.checked`.
    """
    tokens = _tokens(mask, seqlen, seqlen_kv)
    both = zip(*mask.checked(tokens, seqlen_kv))
    return [_stairs(tokens, begin, end) for begin, end in tidy(both)]


def _tokens(mask: Mask, seqlen: int, seqlen_kv: int) -> np.ndarray:
    """Return ascending queries between which the intervals of a mask are straight.

    A mask with one interval may have a method `corners`.  It returns all queries, in any order, at
    which an end of the interval jumps, or its step from one query to the next changes.
    """
    corners = None
    if "corners" in vars(type(mask)):  # a parent's corners may not be those of another `visible`
        corners = mask.corners(seqlen_kv)
    if corners is None:
        return np.arange(seqlen)
    corners = np.append(corners, seqlen)
    tokens = np.unique(np.concatenate([corners - 1, corners, corners + 1]))
    return tokens[(tokens >= 0) & (tokens < seqlen)]


def _stairs(tokens: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Stairs:
    """Return stairs of the intervals of ascending queries, between which they are straight."""
    place = np.flatnonzero(end > begin)
    query, begin, end = tokens[place], begin[place], end[place]
    far, *moves = (np.diff(x) for x in (query, begin, end))
    straight = np.diff(place) == 1
    for x in moves:
        straight &= (x == 0) | (x == far)
    slopes = np.stack([x > 0 for x in moves])  # (2, queries - 1)
    # A run ends where the next step is not straight, or is another one than the step before.
    new = np.ones(len(query), bool)
    new[1:] = ~straight
    new[2:] |= straight[:-1] & (slopes[:, 1:] != slopes[:, :-1]).any(axis=0)
    first = np.flatnonzero(new)
    last = np.append(first, len(query))[1:] - 1
    steps = np.where(last > first, np.append(slopes, [[0], [0]], axis=1)[:, first], 0)
    return Stairs(query[first], query[last] + 1, begin[first], end[first], *steps)
