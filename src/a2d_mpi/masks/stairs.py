"""Masks as stairs: runs of queries whose intervals of keys move by equal steps.

A causal mask is one run, and packed causal documents are one run for each document.  So what
follows from the stairs of a mask needs no array of all tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from a2d_mpi.masks.intervals import Intervals, tidy

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


def cut(stairs: Stairs, queries: np.ndarray, keys: np.ndarray) -> Stairs:
    """Cut runs at bounds of queries, and where an end of the interval arrives at a bound of keys.

    Parameters
    ----------
    stairs : Stairs
    queries, keys : (n,), (m,) int64
        Bounds in ascending order.
    """
    first, last, begin, end, step_begin, step_end = stairs
    cuts = [first]
    for start, step, bounds in (
        (first, 1, queries),
        (begin, step_begin, keys),
        (end, step_end, keys),
    ):
        least = np.searchsorted(bounds, start, side="right")
        number = np.searchsorted(bounds, start + step * (last - first)) - least
        number = np.maximum(number, 0)
        run = np.repeat(np.arange(len(first)), number)
        bound = np.arange(len(run)) + np.repeat(least - np.cumsum(number) + number, number)
        cuts.append(first[run] + bounds[bound] - start[run])
    new = np.sort(np.concatenate(cuts), kind="stable")  # faster than np.unique, which hashes
    new = new[np.diff(new, prepend=-1) > 0]
    run = np.searchsorted(first, new, side="right") - 1
    moved = new - first[run]
    return Stairs(
        new,
        np.minimum(last[run], np.append(new[1:], last[-1:])),
        begin[run] + step_begin[run] * moved,
        end[run] + step_end[run] * moved,
        step_begin[run],
        step_end[run],
    )


def intervals_of(
    mask: Mask, seqlen: int, seqlen_kv: int, q_tokens: np.ndarray, k_tokens: np.ndarray
) -> Intervals:
    """Return what `Mask.intervals` returns, from the stairs of a mask if these are few.

    A first reader can read `Mask.intervals` instead, whose time grows with the tokens.

    Parameters
    ----------
    mask : Mask
    seqlen, seqlen_kv : int
        Queries and keys.
    q_tokens, k_tokens : (nq,), (nk,) int64
        Global indices of queries, in any order, and of keys, sorted.
    """
    if (q_tokens[1:] < q_tokens[:-1]).any():
        order = np.argsort(q_tokens, kind="stable")
        found = intervals_of(mask, seqlen, seqlen_kv, q_tokens[order], k_tokens)
        back = np.argsort(order, kind="stable")
        return Intervals((begin[back], end[back]) for begin, end in found)
    several = stairs_of(mask, seqlen, seqlen_kv)
    gaps = np.flatnonzero(np.diff(k_tokens) != 1)
    pieces = len(several[0].first)
    if len(several) > 1 or 4 * pieces > len(q_tokens) or 4 * len(gaps) > len(k_tokens):
        return mask.intervals(q_tokens, k_tokens)
    bounds = np.stack([k_tokens[gaps] + 1, k_tokens[gaps + 1]], axis=1).ravel()
    bounds = np.concatenate([k_tokens[:1], bounds, k_tokens[-1:] + 1])
    x = cut(several[0], q_tokens[:0], bounds)
    places = [np.searchsorted(k_tokens, key) for key in (x.begin, x.end)]
    steps = [
        step & (np.searchsorted(k_tokens, key, side="right") > place)
        for step, key, place in zip((x.step_begin, x.step_end), (x.begin, x.end), places)
    ]
    # After each run come queries, perhaps none, that see nothing: there the last interval ended.
    number = np.searchsorted(q_tokens, np.stack([x.first, x.last], axis=1).ravel())
    number = np.diff(number, prepend=0, append=len(q_tokens))
    nothing = places[1] + steps[1] * (x.last - 1 - x.first)
    both = []
    for place, step in zip(places, steps):
        moves = np.stack([step, 0 * step], axis=1)
        offset = np.stack([place - step * x.first, nothing], axis=1)
        position = np.repeat(np.append(0, moves), number)  # (nq,)
        position *= q_tokens
        position += np.repeat(np.append(0, offset), number)
        both.append(position)
    return Intervals([tuple(both)])
