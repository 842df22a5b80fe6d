"""Intervals of keys, of many queries at once."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable

import numpy as np

Interval = tuple[np.ndarray, np.ndarray]

EVERYTHING = np.iinfo(np.int64).max


def tidy(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same visible keys in as few intervals as possible.

    Parameters
    ----------
    intervals : tuple of (begin, end), each (nq,) int64
        Disjoint ones of every query; ``end <= begin`` is an empty one.

    Returns
    -------
    tuple of (begin, end), each (nq,) int64
        At least one.  Of a query in ascending order, empty ones last; none touch.
    """
    found = tuple(intervals)
    if len(found) == 1:
        return found
    begin, end = (np.stack(x) for x in zip(*found))  # (m, nq)
    begin, end = _sorted(begin, end)
    touching = (end[:-1] == begin[1:]) & (end[1:] > begin[1:]) & (end[:-1] > begin[:-1])
    if touching.any():
        for i, here in enumerate(touching):  # the later one takes it all, the earlier is empty
            begin[i + 1, here] = begin[i, here]
            end[i, here] = begin[i, here]
        begin, end = _sorted(begin, end)
    used = max(1, int((end > begin).any(axis=1).sum()))
    return tuple((begin[i], end[i]) for i in range(used))


def _sorted(begin: np.ndarray, end: np.ndarray) -> Interval:
    """Intervals of each query in ascending order, empty ones last."""
    order = np.argsort(np.where(end > begin, begin, EVERYTHING), axis=0, kind="stable")
    return np.take_along_axis(begin, order, 0), np.take_along_axis(end, order, 0)


def keys_per_query(intervals: tuple[Interval, ...]) -> np.ndarray:
    """Number of keys that each query sees, (nq,) int64; for `intervals` of `Mask.intervals`."""
    return sum(end - begin for begin, end in intervals)


def queries_per_key(intervals: tuple[Interval, ...], nk: int) -> np.ndarray:
    """Number of queries that see each of `nk` keys, (nk,) int64; the counterpart of the above."""
    steps = sum(
        np.bincount(begin, minlength=nk + 1) - np.bincount(end, minlength=nk + 1)
        for begin, end in intervals
    )
    return np.cumsum(steps)[:nk]


def overlap(begin: np.ndarray, end: np.ndarray) -> tuple[str, int] | None:
    """Find a query two of whose intervals share a key.

    Parameters
    ----------
    begin, end : (m, nq) int64
        The m intervals of every query; ``end <= begin`` is an empty one.

    Returns
    -------
    (str, int) or None
        The two intervals in words, and the place of the query.
    """
    if (np.maximum(begin, end)[:-1] <= begin[1:]).all():  # in order, as mostly
        return None
    begin, end = _sorted(np.where(end > begin, begin, EVERYTHING), end)
    wrong = np.argwhere(end[:-1] > begin[1:])
    if not len(wrong):
        return None
    row, i = wrong[0]
    first, second = ([int(begin[x, i]), int(end[x, i])] for x in (row, row + 1))
    return f"intervals {first} and {second}", int(i)


def checked(
    visible: Callable[[np.ndarray], tuple[Interval, ...]], q_tokens: np.ndarray, nk: int
) -> Interval:
    """Call the method `visible` of a mask, and check what it returns.

    Parameters
    ----------
    visible : method
        `a2d_mpi.core.masks.Mask.visible` of a mask.
    q_tokens : (nq,) int64
        Global indices of the queries.
    nk : int
        Number of keys.

    Returns
    -------
    begin, end : (m, nq) int64
        The m intervals of every query, cut to the keys.

    Raises
    ------
    ValueError
        With the class of the mask and the line, if the method raises an exception, changes its
        argument, or returns anything but pairs of integer arrays of disjoint intervals.
    """
    tokens, found = np.array(q_tokens, np.int64), None
    tokens.setflags(write=False)
    code = getattr(visible, "__code__", None)  # a compiled method has none
    file, line = (code.co_filename, code.co_firstlineno) if code else ("compiled", 0)
    try:
        found = visible(tokens)
        problem = _problem(found, len(tokens))
    except Exception as error:  # of any kind: the mask is the user's
        problem = f"{type(error).__name__}: {error}"
        for call in traceback.extract_tb(error.__traceback__):
            if call.name in ("visible", code and code.co_name):  # a mask may ask another one
                file, line = call.filename, call.lineno
    if inspect.isgenerator(found):
        file, line = found.gi_code.co_filename, found.gi_code.co_firstlineno
    if problem is None:
        begin, end = (np.array(x, np.int64).clip(0, nk) for x in zip(*found))  # (m, nq)
        if not (shared := overlap(begin, end)):
            return begin, end
        problem = f"{shared[0]} of query {tokens[shared[1]]} overlap"
    name = type(visible.__self__).__name__
    raise ValueError(f"{name}.visible: {problem} ({file}, line {line})")


def _problem(found: object, nq: int) -> str | None:
    """Say why something is not what `visible` may return for so many queries; None if it is."""
    if not isinstance(found, (tuple, list)) or not found:
        shown = "an empty " if isinstance(found, (tuple, list)) else "a "
        shown += type(found).__name__
        return f"must return a tuple of pairs (begin, end), returns {shown}"
    for i, pair in enumerate(found):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            return f"item {i} must be a pair (begin, end), is a {type(pair).__name__}"
        for name, x in zip(("begin", "end"), pair):
            shape, dtype = np.shape(x), getattr(x, "dtype", type(x).__name__)
            if shape != (nq,) or getattr(dtype, "kind", "") != "i":
                return (
                    f"{name} of pair {i} must be ({nq},) signed integers, "
                    f"is {dtype} of shape {shape}"
                )
    return None
