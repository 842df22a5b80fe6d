"""Cache blocks of the NumPy kernel.

The kernel cuts its block into pieces that stay in the L2 cache.  Hidden pairs are skipped where a
cache block would hold nothing else, and only cache blocks that an interval cuts take a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.masks import Interval
from a2d_mpi.devices.workspace import Remembered

ALIGN = 32  # keys: unmasked cache blocks begin and end at multiples of it if an interval allows

# Rows of the query block, keys [j0, j1) that they see, and the hidden pairs, if there are any.
CacheBlock = tuple[slice, int, int, "np.ndarray | None"]


class Blocking(NamedTuple):
    """A block, cut into cache blocks.

    Attributes
    ----------
    query_blocks : list of (int, int, list of CacheBlock)
        Query tokens [i0, i1) and their cache blocks.
    rows : int
        Of the largest query block: query tokens x query heads per KV head.
    masked_rows : (nq,) bool
        Queries that see no key: padding, which may hold anything.  It counts as zeros, for 0 times
        NaN is NaN.
    unseen_keys : (nk,) bool
        Keys that no query sees, likewise.
    """

    query_blocks: list[tuple[int, int, list[CacheBlock]]]
    rows: int
    masked_rows: np.ndarray
    unseen_keys: np.ndarray


class Blocker:
    """Cuts blocks into cache blocks of at most `block_q` rows and `block_k` keys."""

    def __init__(self, block_q: int, block_k: int) -> None:
        self.block_q, self.block_k = block_q, block_k
        self._blockings = Remembered()

    def blocking(self, intervals: tuple[Interval, ...], nk: int, group: int) -> Blocking:
        """Cut one block.

        Parameters
        ----------
        intervals : tuple of (begin, end), each (nq,) int
            Visible keys of each query.  They must not change: the blocking of a block as small as
            one cache block is remembered by their identity, as making it takes longer than
            computing the block.
        nk : int
            Keys.
        group : int
            Query heads per KV head.
        """
        if len(intervals[0][0]) * group * nk > self.block_q * self.block_k:
            return self._blocking(intervals, nk, group)
        return self._blockings.get(
            intervals, lambda: self._blocking(intervals, nk, group), nk, group
        )

    def _blocking(self, intervals: tuple[Interval, ...], nk: int, group: int) -> Blocking:
        ends = np.stack([x for pair in intervals for x in pair])  # (2 intervals, nq)
        nq = ends.shape[1]
        step = max(1, self.block_q // group)
        # Rows of very different intervals never share a cache block.
        jumps = np.abs(np.diff(ends, axis=1)).max(axis=0, initial=0) > self.block_q
        cuts = [0, *(np.flatnonzero(jumps) + 1).tolist(), nq]
        query_blocks = []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            for i0 in range(start, stop, step):
                i1 = min(i0 + step, stop)
                cache_blocks = self._cache_blocks(ends[:, i0:i1], 0, 0, nk, group)
                query_blocks.append((i0, i1, list(cache_blocks)))
        return Blocking(query_blocks, min(step, nq) * group, *_outside(intervals, nk))

    def _cache_blocks(
        self, ends: np.ndarray, row: int, a: int, b: int, group: int
    ) -> Iterator[CacheBlock]:
        """Cache blocks of the query tokens of `ends`, from `row` on, with the keys [a, b)."""
        begins, stops = ends[0::2], ends[1::2]  # (intervals, tokens)
        tokens = ends.shape[1]
        # Between two neighbouring edges all rows see all keys, or none, or they differ.  The
        # edges of keys that all rows see move inwards to a round number, for even products.
        inner = np.concatenate([-(-begins.max(axis=1) // ALIGN), stops.min(axis=1) // ALIGN])
        outer = np.concatenate([begins.min(axis=1), stops.max(axis=1)])
        edges = np.unique(np.concatenate([[a, b], inner * ALIGN, outer]).clip(a, b)).tolist()
        for x, y in zip(edges, edges[1:], strict=False):
            full = ((begins <= x) & (stops >= y)).any(axis=0).all()
            if not (full or ((begins < y) & (stops > x)).any()):
                continue
            if not full and tokens * group > self.block_q // 4 and tokens > 1:
                # Fewer rows differ less: less work is thrown away.
                half = tokens // 2
                yield from self._cache_blocks(ends[:, :half], row, x, y, group)
                yield from self._cache_blocks(ends[:, half:], row + half, x, y, group)
                continue
            count = -(-(y - x) // self.block_k)
            bounds = [x + (y - x) * i // count for i in range(count + 1)]
            for j0, j1 in zip(bounds, bounds[1:], strict=False):
                hidden = None
                if not full:
                    keys = np.arange(j0, j1)
                    seen = np.zeros((tokens, j1 - j0), bool)
                    for begin, end in zip(begins, stops, strict=True):
                        seen |= (keys >= begin[:, None]) & (keys < end[:, None])
                    hidden = np.repeat(~seen, group, axis=0)  # (tokens x group, j1 - j0)
                yield slice(row * group, (row + tokens) * group), j0, j1, hidden


def _outside(intervals: tuple[Interval, ...], nk: int) -> tuple[np.ndarray, np.ndarray]:
    """Masked rows, (nq,) bool, and unseen keys, (nk,) bool."""
    change = np.zeros(nk + 1, np.int64)
    for begin, end in intervals:
        np.add.at(change, begin, 1)
        np.add.at(change, end, -1)
    masked_rows = np.all([end <= begin for begin, end in intervals], axis=0)
    return masked_rows, np.cumsum(change[:-1]) == 0
