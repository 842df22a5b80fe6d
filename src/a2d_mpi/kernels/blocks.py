"""Cache blocks of the NumPy kernel.

The kernel cuts its block into cache blocks, which stay in the L2 cache.  Cache blocks with no
visible pair are skipped.  Only cache blocks with visible and hidden pairs need a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from a2d_mpi.masks.intervals import Interval, Intervals, queries_per_key

ALIGN = 32  # cache blocks without mask begin and end at multiples of ALIGN keys, if possible

SLICES = 8  # slices of the keys below a diagonal (bench.py kernels --masks: 4 are slower by 5 %)
NARROWEST = 64  # fewest keys of a slice (32 are slower by 5 % for 256 queries, 128 by 8 %)
SHARED = 16  # fewest rows with a common end of intervals for which a slice ends there
ROOM = 1 << 24  # most bytes of hidden pairs that are kept


class CacheBlock(NamedTuple):
    """Rows of a query block and the keys [j0, j1).

    Attributes
    ----------
    rows : slice
        Rows of the query block.
    j0, j1 : int
    differ : slice or None
        Range of `rows`, counted from their first row, that contains all rows with hidden keys.
        None: all rows see all keys.
    hidden : (rows of differ, j1 - j0) bool or None
        True for hidden pairs.
    """

    rows: slice
    j0: int
    j1: int
    differ: slice | None = None
    hidden: np.ndarray | None = None


class Blocking(NamedTuple):
    """A block, cut into cache blocks.

    Attributes
    ----------
    query_blocks : list of (int, int, list of CacheBlock)
        Query tokens [i0, i1) and their cache blocks.
    rows : int
        Rows of the largest query block: query tokens x query heads per KV head.
    masked_rows : (nq,) bool or None
        True for queries that see no key.  None: every query sees a key.  Masked rows may be
        padding that holds NaN.  The kernel reads them as zeros, because 0 times NaN is NaN.
    masked_keys : (nk,) bool or None
        True for keys that no query sees, which the kernel reads as zeros.  None: every key is
        seen.
    """

    query_blocks: list[tuple[int, int, list[CacheBlock]]]
    rows: int
    masked_rows: np.ndarray | None
    masked_keys: np.ndarray | None


class Blocker:
    """A cutter of blocks into cache blocks of at most `block_q` rows and `block_k` keys."""

    def __init__(self, block_q: int, block_k: int) -> None:
        self.block_q, self.block_k = block_q, block_k
        self._patterns: dict[tuple, np.ndarray] = {}
        self._room, self._complete = ROOM, True

    def blocking(self, intervals: Intervals, nk: int, group: int) -> Blocking:
        """Cut one block.

        Parameters
        ----------
        intervals : Intervals
            Visible keys of each query.  They keep the blocking, because cutting a small block
            takes longer than computing it.
        nk : int
            Number of keys.
        group : int
            Query heads per KV head.
        """
        prepared, key = intervals.prepared, (self, nk, group)
        if key in prepared:
            return prepared[key]
        self._complete = True
        blocking = self._blocking(intervals, nk, group)
        if self._complete or len(intervals[0][0]) * group * nk <= self.block_q * self.block_k:
            prepared[key] = blocking
        return blocking

    def _blocking(self, intervals: tuple[Interval, ...], nk: int, group: int) -> Blocking:
        ends = np.stack([x for pair in intervals for x in pair])  # (2 intervals, nq)
        nq = ends.shape[1]
        step = max(1, self.block_q // group)
        # Rows with very different intervals never share a cache block.
        jumps = np.abs(np.diff(ends, axis=1)).max(axis=0, initial=0) > self.block_q
        cuts = [0, *(np.flatnonzero(jumps) + 1).tolist(), nq]
        query_blocks = []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            for i0 in range(start, stop, step):
                i1 = min(i0 + step, stop)
                cache_blocks = self._cache_blocks(ends[:, i0:i1], nk, group)
                query_blocks.append((i0, i1, list(cache_blocks)))
        hide = (x if x.any() else None for x in masked(intervals, nk))
        return Blocking(query_blocks, min(step, nq) * group, *hide)

    def _cache_blocks(self, ends: np.ndarray, nk: int, group: int) -> Iterator[CacheBlock]:
        """Yield the cache blocks of a query block; `ends` are begins and ends of its intervals.

        Of a causal mask, queries 512 to 1023: all rows see the keys 0 to 511, so these are blocks
        of all rows; rows differ on the keys 512 to 1023, whose blocks have the rows that see them.
        """
        begins, stops = ends[0::2], ends[1::2]  # (intervals, tokens)
        tokens = ends.shape[1]
        # Between two neighbouring edges, all rows see all keys, or no row sees a key, or rows see
        # different keys.  An edge between the first and the last of these cases moves to a
        # multiple of ALIGN, so that products have even sizes.
        outer = np.concatenate([begins.min(axis=1), stops.max(axis=1)])
        inner = np.concatenate([begins.max(axis=1), stops.min(axis=1)])
        up = np.repeat([ALIGN - 1, 0], len(begins))
        inner = np.where(inner == outer, inner, (inner + up) // ALIGN * ALIGN)
        edges = np.unique(np.concatenate([[0, nk], inner, outer]).clip(0, nk)).tolist()
        seen_by_all = None  # first key of the keys before x that all rows see
        for x, y in zip(edges, [*edges[1:], None], strict=True):
            full = y is not None and ((begins <= x) & (stops >= y)).any(axis=0).all()
            if full:
                seen_by_all = x if seen_by_all is None else seen_by_all
                continue
            if seen_by_all is not None:
                for j0, j1 in even(seen_by_all, x, self.block_k):
                    yield CacheBlock(slice(0, tokens * group), j0, j1)
                seen_by_all = None
            if y is not None and ((begins < y) & (stops > x)).any():
                yield from self._differing(begins, stops, x, y, group)

    def _differing(
        self, begins: np.ndarray, stops: np.ndarray, x: int, y: int, group: int
    ) -> Iterator[CacheBlock]:
        """Yield cache blocks with the keys [x, y), where rows see different keys.

        A cache block has few keys, because few rows differ on few keys.  It has all rows that see
        any of these keys.  Products of many rows and few keys are as fast as large products.
        """
        tokens = begins.shape[1]
        # Cut the keys where many rows have an end, for example at ends of documents.
        shared, rows = np.unique(np.concatenate([begins, stops]), return_counts=True)
        shared = shared[(rows >= SHARED) & (shared > x) & (shared < y)]
        cuts = [x, *shared.tolist(), y]
        width = min(self.block_k, max(NARROWEST, tokens // SLICES))
        for start, stop in zip(cuts, cuts[1:], strict=False):
            for j0, j1 in even(start, stop, width):
                seen = ((begins < j1) & (stops > j0) & (begins < stops)).any(axis=0)  # (tokens,)
                sees_all = ((begins <= j0) & (stops >= j1)).any(axis=0)  # (tokens,)
                for i0, i1 in _stretches(seen):
                    rows = slice(i0 * group, i1 * group)
                    differ = np.flatnonzero(~sees_all[i0:i1])
                    if not len(differ):
                        yield CacheBlock(rows, j0, j1)
                        continue
                    a, b = int(differ[0]), int(differ[-1]) + 1
                    ends = np.stack([begins[:, i0 + a : i0 + b], stops[:, i0 + a : i0 + b]])
                    hidden = self._hidden(ends.clip(j0, j1) - j0, j1 - j0, group)
                    yield CacheBlock(rows, j0, j1, slice(a * group, b * group), hidden)

    def _hidden(self, ends: np.ndarray, nk: int, group: int) -> np.ndarray:
        """Return the hidden pairs, (tokens x group, nk) bool, of intervals.

        Many cache blocks have the same hidden pairs, so one array serves all of them.

        Parameters
        ----------
        ends : (2, intervals, tokens) int
            Begins and ends of intervals.
        nk, group : int
        """
        ends = ends.astype(np.int32)
        key = nk, group, ends.shape, ends.tobytes()
        if key in self._patterns:
            return self._patterns[key]
        keys, shown = np.arange(nk, dtype=np.int32), np.zeros((ends.shape[2], nk), bool)
        for begin, end in ends.swapaxes(0, 1)[..., None]:
            shown |= (keys >= begin) & (keys < end)
        hidden = np.repeat(~shown, group, axis=0)
        if hidden.nbytes > self._room:
            self._complete = False
            return hidden
        self._room -= hidden.nbytes
        self._patterns[key] = hidden
        return hidden


def even(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut a range into equal ranges of at most `most` elements."""
    count = -(-(stop - start) // most)
    bounds = [start + (stop - start) * i // count for i in range(count + 1)]
    return pairwise(bounds)


def _stretches(seen: np.ndarray) -> list[tuple[int, int]]:
    """Return stretches of rows that see a key; a stretch may have gaps below `SHARED` rows."""
    rows = np.flatnonzero(seen)
    if not len(rows):
        return []
    gaps = np.flatnonzero(np.diff(rows) > SHARED)
    firsts, lasts = np.append(0, gaps + 1), np.append(gaps, len(rows) - 1)
    return list(zip(rows[firsts].tolist(), (rows[lasts] + 1).tolist(), strict=True))


def masked(intervals: tuple[Interval, ...], nk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each row is masked, (nq,) bool, and whether each key is, (nk,) bool."""
    rows = np.all([end <= begin for begin, end in intervals], axis=0)
    return rows, queries_per_key(intervals, nk) == 0
