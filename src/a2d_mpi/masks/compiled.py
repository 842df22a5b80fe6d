"""Compiled masks: a mask that was checked for one sequence, as stairs.

A problem makes it, and passes it to all that asks what is visible.  Stairs are runs of queries
whose intervals of keys move by equal steps.  A causal mask is one run, and packed causal documents
are one run for each document.  So what follows from the stairs of a mask needs no array of all
tokens.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from a2d_mpi.masks.intervals import Interval, overlap, tidy
from a2d_mpi.masks.mask import Aligned, Mask

_REPEATED = 64  # queries that are passed again, in another order
T = TypeVar("T")


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

    Examples
    --------
    A causal mask of N tokens is one run: first 0, last N, begin 0, end 1, steps 0 and 1.
    """

    first: np.ndarray
    last: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    step_begin: np.ndarray
    step_end: np.ndarray


@dataclass(frozen=True, eq=False)
class CompiledMask:
    """The visible pairs of a mask on a sequence; `compile_mask` makes it.

    Attributes
    ----------
    given, mask : Mask
        The mask of the user, and the same from `Mask.aligned`.
    seqlen, seqlen_kv : int
        Queries and keys.
    stairs : tuple of Stairs
        The visible pairs, for each of the intervals of a query.
    """

    given: Mask
    mask: Mask
    seqlen: int
    seqlen_kv: int
    stairs: tuple[Stairs, ...]
    _made: dict[tuple, object] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits, which ranks compare; equal for the same visible pairs."""
        digest = hashlib.sha256()
        for stairs in self.stairs:
            digest.update(np.append(len(stairs.first), stairs))
        return digest.hexdigest()[:12]

    @cached_property
    def area(self) -> int:
        """Number of visible pairs."""
        area = 0
        for first, last, begin, end, step_begin, step_end in self.stairs:
            n = last - first
            area += (n * (end - begin) + (step_end - step_begin) * (n * (n - 1) // 2)).sum()
        return int(area)

    def once(self, make: Callable[..., T], *arguments: object) -> T:
        """Return ``make(self, *arguments)``, which is computed at the first call."""
        key = make, *arguments
        if key not in self._made:
            self._made[key] = make(self, *arguments)
        return self._made[key]


def compile_mask(mask: Mask | CompiledMask, seqlen: int, seqlen_kv: int) -> CompiledMask:
    """Check and compile a mask for a sequence.

    Parameters
    ----------
    mask : Mask or CompiledMask
        A compiled mask of these lengths is returned.
    seqlen, seqlen_kv : int
        Queries and keys.

    Raises
    ------
    ValueError
        If the mask has no meaning for these lengths, or cannot be hashed.  If `visible` raises an
        exception, changes its argument, or does not return pairs of integer arrays with disjoint
        intervals.  If the intervals of a query depend on the other queries of the call.
    """
    if isinstance(mask, CompiledMask):
        if (mask.seqlen, mask.seqlen_kv) != (seqlen, seqlen_kv):
            raise ValueError(
                f"a mask was compiled for {mask.seqlen} queries and {mask.seqlen_kv} keys, "
                f"got {seqlen} and {seqlen_kv}"
            )
        return mask
    aligned = mask.aligned(seqlen, seqlen_kv)
    try:  # masks of plans are compared
        hash(aligned)
    except TypeError as error:
        raise ValueError(
            f"{type(mask).__name__} cannot be hashed ({error}): make it a frozen dataclass of "
            "numbers, or derive it from a2d_mpi.masks.arrays.ArrayMask if it holds arrays"
        ) from None
    tokens = _around_corners(aligned, seqlen, seqlen_kv)
    stairs = (stairs_of(tokens, *x) for x in visible_keys(aligned, tokens, seqlen_kv))
    compiled = CompiledMask(mask, aligned, seqlen, seqlen_kv, tuple(stairs))
    number = min(_REPEATED, seqlen)
    spread = np.arange(number) * (seqlen - 1) // max(number - 1, 1)
    check_repeats(aligned, spread, seqlen_kv)
    return compiled


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


def check_repeats(mask: Mask, tokens: np.ndarray, nk: int) -> None:
    """Raise ValueError if queries see other keys in another order, or `visible` needs queries."""
    expected = dict(_by_query(mask, tokens, nk))
    for others in (tokens[::-2], tokens[:0]):  # another order; no tokens, as in an empty shard
        for query, keys in _by_query(mask, others, nk):
            if keys != expected[query]:
                name = type(mask.mask if isinstance(mask, Aligned) else mask).__name__
                raise ValueError(
                    f"{name}.visible: query {query} sees the keys {expected[query]} in one call "
                    f"and {keys} in a call with other queries or in another order"
                )


def visible_keys(mask: Mask, q_tokens: np.ndarray, nk: int) -> tuple[Interval, ...]:
    """Call `Mask.visible`, and check the intervals that it returns.

    Parameters
    ----------
    mask : Mask
    q_tokens : (nq,) int64
        Queries.
    nk : int
        Number of keys.

    Returns
    -------
    tuple of (begin, end), each (nq,) int64
        The intervals, tidy (`a2d_mpi.masks.intervals.tidy`) and clipped to the keys.

    Raises
    ------
    ValueError
        The message names the class of the mask, and of an exception the file and the line.
    """
    if isinstance(mask, Aligned):
        return visible_keys(mask.mask, np.asarray(q_tokens, np.int64) + mask.offset, nk)
    tokens, ends = np.array(q_tokens, np.int64), np.array(None)
    tokens.setflags(write=False)
    try:
        intervals = mask.visible(tokens)
        with suppress(ValueError):  # of arrays with several shapes
            ends = np.array(intervals)  # (m, 2, nq)
    except Exception as error:  # a user's mask may raise anything
        where = traceback.extract_tb(error.__traceback__)[:2][-1]  # the line of `visible`
        problem = f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
    else:
        if ends.shape[1:] == (2, len(tokens)) and ends.dtype.kind == "i":
            begin, end = ends.astype(np.int64).clip(0, nk).swapaxes(0, 1)  # (m, nq)
            if not (shared := overlap(begin, end)):
                return tidy(zip(begin, end))
            problem = f"{shared[0]} of query {tokens[shared[1]]} overlap"
        else:
            problem = (
                f"must return pairs (begin, end) of ({len(tokens)},) signed integers, "
                f"got {ends.dtype} of shape {ends.shape}"
            )
    raise ValueError(f"{type(mask).__name__}.visible: {problem}")


def _by_query(mask: Mask, q_tokens: np.ndarray, nk: int) -> list[tuple[int, list]]:
    """Return each query with its intervals of visible keys, tidy and in order."""
    ends = np.array(visible_keys(mask, q_tokens, nk))  # (intervals, 2, nq)
    return [
        (query, [x for x in of_query if x[0] < x[1]])
        for query, of_query in zip(q_tokens.tolist(), ends.transpose(2, 0, 1).tolist())
    ]


def _around_corners(mask: Mask, seqlen: int, seqlen_kv: int) -> np.ndarray:
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
