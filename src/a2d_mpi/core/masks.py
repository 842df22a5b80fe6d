"""Masks: the visible keys of each query, as intervals of global key indices.

A mask gives every query one visible interval ``[begin, end)`` of keys, or a tuple of disjoint
ones.  An interval restricted to any *sorted* subset of the keys is again an interval, found by
two ``searchsorted`` calls.  So every mask works with every distribution and on every grid.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

Interval = tuple[np.ndarray, np.ndarray]

_EVERYTHING = np.iinfo(np.int64).max


class Mask:
    """Base of all masks: subclasses define `visible`, and the other methods follow from it.

    Attributes
    ----------
    default_distribution : str
        The distribution that balances this mask best on every grid.
    """

    default_distribution = "striped"

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        """Visible keys of each query, in global indices.

        Parameters
        ----------
        q_tokens : (nq,) int64
            Global indices of the queries.

        Returns
        -------
        tuple of (begin, end), each (nq,) int64
            Query ``i`` sees the keys ``begin[i] <= j < end[i]`` of every pair.  The intervals of
            one query do not overlap; ``end <= begin`` is an empty one.
        """
        raise NotImplementedError

    def check(self, seqlen: int) -> None:
        """Raise ValueError if the mask cannot be used on a sequence of `seqlen` tokens."""

    def aligned(self, seqlen: int, seqlen_kv: int) -> Mask:
        """The mask of queries that are the last tokens of the keys' sequence."""
        return self

    def digest(self, seqlen: int) -> str:
        """Short text that follows from the visible keys of `seqlen` queries; ranks compare it."""
        digest = hashlib.sha256()
        for start in range(0, seqlen, 1 << 16):
            for pair in self.visible(np.arange(start, min(start + (1 << 16), seqlen))):
                for x in pair:
                    digest.update(np.ascontiguousarray(x, np.int64).clip(0, seqlen))
        return digest.hexdigest()[:12]

    def intervals(self, q_tokens: np.ndarray, k_tokens: np.ndarray) -> tuple[Interval, ...]:
        """Visible keys of each query as positions in `k_tokens`.

        Parameters
        ----------
        q_tokens : (nq,) int64
            Global indices of the queries, in any order.
        k_tokens : (nk,) int64
            Global indices of the keys, sorted.

        Returns
        -------
        tuple of (begin, end), each (nq,) int64
            ``0 <= begin <= end <= nk``.
        """
        found = []
        for begin, end in self.visible(q_tokens):
            first = np.searchsorted(k_tokens, begin)
            found.append((first, np.maximum(first, np.searchsorted(k_tokens, end))))
        return tuple(found)

    def area(self, q_tokens: np.ndarray, k_tokens: np.ndarray) -> int:
        """Number of visible (query, key) pairs, from which balance and FLOP figures come."""
        return int(np.sum(keys_per_query(self.intervals(q_tokens, k_tokens))))

    def dense(self, q_tokens: np.ndarray, k_tokens: np.ndarray) -> np.ndarray:
        """Visibility as a (nq, nk) boolean matrix, straight from `visible`, for references."""
        k = np.asarray(k_tokens)[None, :]
        seen = np.zeros((len(q_tokens), len(k_tokens)), dtype=bool)
        for begin, end in self.visible(np.asarray(q_tokens)):
            seen |= (k >= begin[:, None]) & (k < end[:, None])
        return seen


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    # All rows cost the same: any equal shards balance, and contiguous ones keep neighbours.
    default_distribution = "contiguous"

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        n = len(q_tokens)
        return ((np.zeros(n, np.int64), np.full(n, _EVERYTHING)),)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and the keys before it."""

    default_distribution = "zigzag"

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        return ((np.zeros(len(q_tokens), np.int64), np.asarray(q_tokens, np.int64) + 1),)


@dataclass(frozen=True, eq=False)
class IntervalMask(Mask):
    """Any mask whose rows each see one interval: sliding windows, packed documents, prefixes.

    Parameters
    ----------
    begin, end : (seqlen,) integers
        Query ``i`` sees the keys ``begin[i] <= j < end[i]``; none where ``end[i] <= begin[i]``.
        Every rank passes the whole arrays (16 bytes a token).

    Raises
    ------
    ValueError
        If the arrays are not one-dimensional integers of one length.
    """

    begin: np.ndarray
    end: np.ndarray

    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            array = np.array(getattr(self, name))
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError(
                    f"IntervalMask: {name} must be a one-dimensional integer array, "
                    f"got shape {array.shape} of {array.dtype}"
                )
            array = array.clip(max=_EVERYTHING).astype(np.int64)  # uint64 holds larger numbers
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if len(self.begin) != len(self.end):
            raise ValueError(
                f"IntervalMask: begin has {len(self.begin)} rows, end has {len(self.end)}"
            )

    def __repr__(self) -> str:
        return f"IntervalMask({len(self.begin)} rows)"

    def check(self, seqlen: int) -> None:
        if len(self.begin) != seqlen:
            raise ValueError(
                f"IntervalMask has {len(self.begin)} rows for a sequence of {seqlen} tokens"
            )

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        return ((self.begin[q_tokens], self.end[q_tokens]),)


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


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive queries that see one mask shape.

    Attributes
    ----------
    rows : slice
        The queries.
    shape : str
        The mask shape.  "full": all queries see the same keys.  "causal": the last query sees all
        of `keys`, each one before it one key fewer.  "band": like causal, and each query sees
        `window` keys.  "general": any other shape, the empty one included.
    keys : slice
        The keys that any of the queries sees; empty for a general shape.
    window : int
        Keys that each query sees, for a band.
    intervals : tuple of (begin, end)
        Visible keys of these queries, as positions among all keys of the block.
    """

    rows: slice
    shape: str
    keys: slice
    window: int
    intervals: tuple[Interval, ...]


def runs(intervals: tuple[Interval, ...], shortest: int = 1) -> list[Run]:
    """Cut a block into runs of queries, each of one mask shape.

    Kernels without a general mask compute runs of simple shapes.

    Parameters
    ----------
    intervals : tuple of (begin, end), each (nq,) int
        Visible keys of each query, as positions among the keys of the block.
    shortest : int
        Neighbouring runs of fewer queries make one general run: a launch each would cost more.
    """
    nq = len(intervals[0][0])
    begin, end = (np.asarray(x, np.int64) for x in intervals[0])
    # The step from each query to the next: none, the end by one, or both ends by one.
    step = np.diff(begin) * 4 + np.diff(end)
    shapes = {0: "full", 1: "causal", 5: "band"}
    step[(np.abs(np.diff(begin)) > 1) | ~np.isin(step, list(shapes))] = -1
    simple = end > begin
    for other_begin, other_end in intervals[1:]:
        simple &= other_end <= other_begin
    step[simple[1:] != simple[:-1]] = -1
    step[~simple[1:] & ~simple[:-1]] = 9  # neighbours of no simple shape stay together
    cuts = np.flatnonzero(np.diff(step)) + 1  # places where the step changes
    found: list[tuple[int, int, str]] = []
    first = 0
    while first < nq:
        code = step[first] if first < nq - 1 else 0
        last = first + 1
        if code != -1 and first < nq - 1:
            following = np.searchsorted(cuts, first, side="right")
            last = (int(cuts[following]) if following < len(cuts) else nq - 1) + 1
        shape = shapes.get(int(code), "full") if simple[first] else "general"
        short = last - first < shortest
        if found and (short or shape == "general"):
            a, b, before = found[-1]
            if before == "general" or b - a < shortest:
                found[-1] = (a, last, "general")
                first = last
                continue
        found.append((first, last, shape))
        first = last
    return [
        Run(
            slice(a, b),
            shape,
            slice(int(begin[a]), int(end[b - 1])) if shape != "general" else slice(0, 0),
            int(end[a] - begin[a]) if shape == "band" else 0,
            tuple((x[a:b], y[a:b]) for x, y in intervals),
        )
        for a, b, shape in found
    ]


MASKS = {"full": Full, "causal": Causal}
