"""How the NumPy kernel cuts a tile into blocks: what is hidden is skipped, and only blocks that an
interval cuts take a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.masks import Interval
from a2d_mpi.devices.workspace import Remembered

ALIGN = 32  # keys: full blocks begin and end at multiples of it where an interval allows

# Rows of a block, keys [j0, j1) that they see, and which pairs are hidden, if some are.
Piece = tuple[slice, int, int, "np.ndarray | None"]


class Cut(NamedTuple):
    """A tile in blocks.

    Attributes
    ----------
    blocks : list of (int, int, list of Piece)
        Query tokens [i0, i1) and what they see.
    rows : int
        Of the largest block: query tokens x query heads per key head.
    blind : (nq,) bool
        Queries that see no key: padding, which may hold anything.  It counts as zeros, for 0 times
        NaN is NaN.
    unseen : (nk,) bool
        Keys that no query sees, likewise.
    """

    blocks: list[tuple[int, int, list[Piece]]]
    rows: int
    blind: np.ndarray
    unseen: np.ndarray


class Cutter:
    """Cuts tiles into blocks of at most `block_q` rows and `block_k` keys."""

    def __init__(self, block_q: int, block_k: int) -> None:
        self.block_q, self.block_k = block_q, block_k
        self._cuts = Remembered()

    def cut(self, intervals: tuple[Interval, ...], nk: int, group: int) -> Cut:
        """The blocks of a tile.

        Parameters
        ----------
        intervals : tuple of (begin, end), each (nq,) int
            Visible keys of each query.  Not to be changed: how a tile of one block or less is cut
            is remembered by their identity, as cutting it takes longer than computing it.
        nk : int
            Keys.
        group : int
            Query heads per key head.
        """
        if len(intervals[0][0]) * group * nk > self.block_q * self.block_k:
            return self._cut(intervals, nk, group)
        return self._cuts.get(intervals, lambda: self._cut(intervals, nk, group), nk, group)

    def _cut(self, intervals: tuple[Interval, ...], nk: int, group: int) -> Cut:
        ends = np.stack([x for pair in intervals for x in pair])
        nq = ends.shape[1]
        step = max(1, self.block_q // group)
        # Rows of very different intervals never share a block.
        jumps = np.abs(np.diff(ends, axis=1)).max(axis=0, initial=0) > self.block_q
        cuts = [0, *(np.flatnonzero(jumps) + 1).tolist(), nq]
        blocks = []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            for i0 in range(start, stop, step):
                i1 = min(i0 + step, stop)
                pieces = self._pieces(ends[:, i0:i1], 0, 0, nk, group)
                blocks.append((i0, i1, list(pieces)))
        return Cut(blocks, min(step, nq) * group, *_outside(intervals, nk))

    def _pieces(self, ends: np.ndarray, row: int, a: int, b: int, group: int) -> Iterator[Piece]:
        """Cut what the tokens of `ends`, from `row` on, see of the keys [a, b)."""
        begins, stops = ends[0::2], ends[1::2]
        tokens = ends.shape[1]
        # Between two neighbouring edges all rows see all keys, or none, or they differ.  The
        # edges of what all rows see move inwards to a round number, for even block products.
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
                yield from self._pieces(ends[:, :half], row, x, y, group)
                yield from self._pieces(ends[:, half:], row + half, x, y, group)
                continue
            pieces = -(-(y - x) // self.block_k)
            bounds = [x + (y - x) * i // pieces for i in range(pieces + 1)]
            for j0, j1 in zip(bounds, bounds[1:], strict=False):
                hidden = None
                if not full:
                    keys = np.arange(j0, j1)
                    seen = np.zeros((tokens, j1 - j0), bool)
                    for begin, end in zip(begins, stops, strict=True):
                        seen |= (keys >= begin[:, None]) & (keys < end[:, None])
                    hidden = np.repeat(~seen, group, axis=0)
                yield slice(row * group, (row + tokens) * group), j0, j1, hidden


def _outside(intervals: tuple[Interval, ...], nk: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries that see no key, and keys that no query sees."""
    change = np.zeros(nk + 1, np.int64)
    for begin, end in intervals:
        np.add.at(change, begin, 1)
        np.add.at(change, end, -1)
    blind = np.all([end <= begin for begin, end in intervals], axis=0)
    return blind, np.cumsum(change[:-1]) == 0
