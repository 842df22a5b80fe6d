"""Demand of a mask in blocks of tokens: the visible pairs of each pair of blocks and its tokens.

The tokens of a block are put into *classes* that the same blocks need: the queries of a class see
keys in the same blocks; the keys of a class are seen from the same blocks.  A rank that computes
some pairs of blocks needs a class if any of these pairs does: so traffic is counted to the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from a2d_mpi.core.blocks import chunks, visible_pairs
from a2d_mpi.core.masks import Interval, Mask

# Classes of a block.  The masks of packed documents and windows have 1 to 3; where a mask has
# more, neighbouring classes are joined, and traffic is an upper bound.
_CLASSES = 16


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes of the queries, or of the keys, of all blocks.

    Attributes
    ----------
    block : (classes,) int64
        The block of each class, ascending.
    weight : (classes,) float64
        Number of its tokens.
    first : (pairs + 1,) int64
    index : (first[-1],) int64
        Pair i of blocks needs the classes ``index[first[i] : first[i + 1]]``.
    """

    block: np.ndarray
    weight: np.ndarray
    first: np.ndarray
    index: np.ndarray

    def of(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Needs of some pairs, as (place among `pairs`, class), one entry each."""
        number = self.first[pairs + 1] - self.first[pairs]
        place = np.repeat(np.arange(len(pairs)), number)
        before = np.cumsum(number) - number
        within = np.arange(len(place)) - before[place]
        return place, self.index[self.first[pairs][place] + within]


@dataclass(frozen=True, eq=False)
class Demand:
    """Work and needs of the pairs of blocks in which any query sees any key.

    Attributes
    ----------
    bounds : (blocks + 1,) int64
    row, col : (pairs,) int64
        Block of the queries and block of the keys of each pair, ordered by row, then by column.
    visible : (pairs,) int64
        Visible pairs of tokens.
    queries, keys : Classes
    kv_share : float
        ``nheads_kv / nheads``: elements of k, or of v, a token, with those of q as the unit.
    """

    bounds: np.ndarray
    row: np.ndarray
    col: np.ndarray
    visible: np.ndarray
    queries: Classes
    keys: Classes
    kv_share: float

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens of every block: (blocks,) int64."""
        return np.diff(self.bounds)

    def documents(self) -> np.ndarray:
        """Number the groups of blocks that no pair connects with another: (blocks,) int64."""
        steps = np.zeros(len(self.bounds), np.int64)
        np.add.at(steps, np.minimum(self.row, self.col), 1)
        np.add.at(steps, np.maximum(self.row, self.col), -1)
        apart = np.cumsum(steps)[:-1] == 0  # this block and the next
        return np.concatenate(([0], np.cumsum(apart)[:-1])).astype(np.int64)


def demand(mask: Mask, bounds: np.ndarray, kv_share: float = 1.0) -> Demand:
    """Count the demand of a mask in the blocks of tokens with the given bounds."""
    visible = visible_pairs(mask, bounds, bounds)
    row, col = np.nonzero(visible)
    pair = np.full(visible.shape, -1, np.int64)
    pair[row, col] = np.arange(len(row))
    return Demand(
        bounds,
        row,
        col,
        visible[row, col],
        _query_classes(mask, bounds, pair),
        _key_classes(mask, bounds, pair.T),
        kv_share,
    )


def _query_classes(mask: Mask, bounds: np.ndarray, pair: np.ndarray) -> Classes:
    """Classes of queries that see keys in the same blocks."""
    found, lengths = [], []
    for tokens, intervals in chunks(mask, int(bounds[0]), int(bounds[-1])):
        columns = [np.searchsorted(bounds, tokens, side="right") - 1]
        for begin, end in _clipped(intervals, bounds):
            some = end > begin
            columns.append(np.where(some, np.searchsorted(bounds, begin, side="right") - 1, 0))
            columns.append(np.where(some, np.searchsorted(bounds, end), 0))
        rows = np.stack(columns, axis=1)
        start = np.flatnonzero((np.diff(rows, axis=0, prepend=-1) != 0).any(axis=1))
        found.append(rows[start])
        lengths.append(np.diff(start, append=len(rows)))
    rows, place, same = np.unique(
        np.concatenate(found), axis=0, return_index=True, return_inverse=True
    )
    weight = np.bincount(same.ravel(), weights=np.concatenate(lengths))
    order = np.argsort(place)
    rows, weight = rows[order], weight[order]
    group, block = _groups(rows[:, 0])
    steps = np.zeros((len(block), len(pair) + 1), np.int64)
    for i in range(1, rows.shape[1], 2):
        np.add.at(steps, (group, rows[:, i]), 1)
        np.add.at(steps, (group, rows[:, i + 1]), -1)
    return _classes(block, np.bincount(group, weights=weight), steps[:, :-1], pair)


def _key_classes(mask: Mask, bounds: np.ndarray, pair: np.ndarray) -> Classes:
    """Classes of keys that are seen from the same blocks."""
    seen = [_union(mask, bounds, *x) for x in zip(bounds[:-1].tolist(), bounds[1:].tolist())]
    cut = np.unique(np.concatenate([bounds, *(x for ends in seen for x in ends)]))
    group, block = _groups(np.searchsorted(bounds, cut[:-1], side="right") - 1)
    weight = np.bincount(group, weights=np.diff(cut))
    steps = np.zeros((len(block) + 1, len(pair)), np.int64)
    for i, (begin, end) in enumerate(seen):
        np.add.at(steps, (group[np.searchsorted(cut, begin)], i), 1)
        np.add.at(steps, (group[np.searchsorted(cut, end) - 1] + 1, i), -1)
    return _classes(block, weight, np.cumsum(steps, axis=0)[:-1], pair, summed=True)


def _clipped(intervals: tuple[Interval, ...], bounds: np.ndarray) -> list[Interval]:
    return [tuple(np.clip(x, bounds[0], bounds[-1]) for x in pair) for pair in intervals]


def _union(mask: Mask, bounds: np.ndarray, first: int, last: int) -> Interval:
    """Keys that queries of [first, last) see, as disjoint ascending intervals."""
    begins, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for _, intervals in chunks(mask, first, last):
        for begin, end in _clipped(intervals, bounds):
            some = end > begin
            begins.append(begin[some])
            ends.append(end[some])
    begin, end = np.concatenate(begins), np.concatenate(ends)
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    if not len(begin):
        return begin, end
    new = np.flatnonzero(np.concatenate(([True], begin[1:] > end[:-1])))
    return begin[new], end[np.concatenate((new[1:], [len(begin)])) - 1]


def _groups(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join neighbouring classes of a block that has many: the group of each, and its block."""
    block = np.asarray(block)
    start = np.searchsorted(block, block)
    number = np.bincount(block, minlength=1)[block]
    place = np.arange(len(block)) - start
    within = np.where(number > _CLASSES, place * _CLASSES // np.maximum(number, 1), place)
    new = np.diff(within + block * (_CLASSES + 1), prepend=-1) != 0
    return np.cumsum(new) - 1, block[new]


def _classes(
    block: np.ndarray,
    weight: np.ndarray,
    steps: np.ndarray,
    pair: np.ndarray,
    summed: bool = False,
) -> Classes:
    """Classes from the blocks that need them, or from the steps of their number."""
    needs = (steps if summed else np.cumsum(steps, axis=1)) > 0
    # Classes of a block with the same needs are one; those that nobody needs are none.
    packed = np.concatenate([block[:, None], np.packbits(needs, axis=1)], axis=1)
    _, place, same = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    weight = np.bincount(same.ravel(), weights=weight, minlength=len(place))
    some = needs[place].any(axis=1) & (weight > 0)
    order = np.argsort(block[place[some]], kind="stable")
    block, needs = block[place[some]][order], needs[place[some]][order]
    index, other = np.nonzero(needs)
    which = pair[block[index], other]
    by_pair = np.argsort(which, kind="stable")
    first = np.searchsorted(which[by_pair], np.arange(pair.max(initial=-1) + 2))
    return Classes(block, weight[some][order], first, index[by_pair])
