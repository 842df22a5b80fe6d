"""Visible pairs as stairs: runs of queries whose intervals of keys move by equal steps.

A causal mask is one run, and packed causal documents are one run for each document.  So what
follows from the stairs of a mask needs no array of all tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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


def stairs_of(tokens: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Stairs:
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
