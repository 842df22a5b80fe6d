"""The demand of a mask in blocks of tokens: visible pairs and required tokens of pairs of blocks.

The tokens of a block are divided into *classes*.  The queries of a class see keys in the same
blocks.  The keys of a class are seen by queries in the same blocks.  A rank needs a class if any
pair of blocks that it computes needs it.  So the counted traffic is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from a2d_mpi.masks.intervals import Runs, queries_per_key
from a2d_mpi.masks.mask import Mask
from a2d_mpi.sharding.blocks import visible_pairs
from a2d_mpi.sharding.visibility import keys_seen, queries_seeing

# Most classes of a block.  Masks of packed documents and windows have 1 to 3.  If a mask has more,
# neighbouring classes are joined, and the counted traffic is an upper bound.
_CLASSES = 16


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes of the queries, or of the keys, of all blocks.

    Attributes
    ----------
    block : (classes,) int64
        The block of each class, ascending.
    weight : (classes,) float64
        Number of tokens of each class.
    first : (pairs + 1,) int64
    index : (first[-1],) int64
        Pair i of blocks needs the classes ``index[first[i] : first[i + 1]]``.
    """

    block: np.ndarray
    weight: np.ndarray
    first: np.ndarray
    index: np.ndarray

    def of(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays with an entry for each class that a pair needs.

        The first array holds the place of the pair in `pairs`, and the second array the class.
        """
        number = self.first[pairs + 1] - self.first[pairs]
        place = np.repeat(np.arange(len(pairs)), number)
        before = np.cumsum(number) - number
        within = np.arange(len(place)) - before[place]
        return place, self.index[self.first[pairs][place] + within]


@dataclass(frozen=True, eq=False)
class Demand:
    """Work and required tokens of all pairs of blocks that have a visible (query, key) pair.

    Attributes
    ----------
    bounds : (blocks + 1,) int64
        Block b is the tokens ``[bounds[b], bounds[b + 1])``.
    row, col : (pairs,) int64
        Block of queries and block of keys of each pair, ordered by row, then by column.
    visible : (pairs,) int64
        Number of visible (query, key) pairs in each pair of blocks.
    queries, keys : Classes
    kv_share : float
        ``nheads_kv / nheads``: the elements of a token of k, or of v, over the elements of q.
    """

    bounds: np.ndarray
    row: np.ndarray
    col: np.ndarray
    visible: np.ndarray
    queries: Classes
    keys: Classes
    kv_share: float

    @property
    def pairs(self) -> np.ndarray:
        """Block of queries and block of keys of each pair, (pairs, 2) int64."""
        return np.stack([self.row, self.col], axis=1)

    @property
    def blocks(self) -> list[range]:
        """Tokens of every block."""
        return list(map(range, self.bounds[:-1].tolist(), self.bounds[1:].tolist()))

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens of every block, (blocks,) int64."""
        return np.diff(self.bounds)

    def documents(self) -> np.ndarray:
        """Return the document of each block, (blocks,) int64; no pair connects two documents."""
        first, last = np.minimum(self.row, self.col), np.maximum(self.row, self.col)
        # True if no pair connects this block or an earlier one with a later block.
        apart = queries_per_key([(first, last)], len(self.tokens)) == 0
        return np.concatenate(([0], np.cumsum(apart)[:-1])).astype(np.int64)


def demand(mask: Mask, bounds: np.ndarray, kv_share: float = 1.0) -> Demand:
    """Count the demand of a mask in blocks of tokens.

    Parameters
    ----------
    mask : Mask
    bounds : (blocks + 1,) int64
        Bounds of the blocks.
    kv_share : float
        ``nheads_kv / nheads``.
    """
    visible = visible_pairs(mask, bounds, bounds)
    row, col = np.nonzero(visible)
    pair = np.full(visible.shape, -1, np.int64)
    pair[row, col] = np.arange(len(row))
    return Demand(
        bounds,
        row,
        col,
        visible[row, col],
        _classes(mask, bounds, queries_seeing, pair),
        _classes(mask, bounds, keys_seen, pair.T),
        kv_share,
    )


def _classes(
    mask: Mask, bounds: np.ndarray, tokens_of: Callable[..., Runs], pair: np.ndarray
) -> Classes:
    """Divide the tokens of every block into classes.

    Parameters
    ----------
    mask : Mask
    bounds : (blocks + 1,) int64
    tokens_of : callable
        Returns the queries that see a block of keys, or the keys that a block of queries sees.
    pair : (blocks, blocks) int64
        Number of the pair of a block of these tokens and a block on the other side; -1 if no pair.
    """
    n, others = int(bounds[-1]), np.stack([bounds[:-1], bounds[1:]], axis=1)
    runs = [np.array(tokens_of(mask, n, n, x[None]), np.int64).reshape(-1, 2) for x in others]
    # The same blocks need all tokens between two of these bounds.
    cut = np.unique(np.concatenate([bounds, *(x.ravel() for x in runs)]))
    needs = np.zeros((len(cut) - 1, len(runs)), bool)
    for other, x in enumerate(runs):
        for first, last in np.searchsorted(cut, x).tolist():
            needs[first:last, other] = True
    block, weight = np.searchsorted(bounds, cut[:-1], side="right") - 1, np.diff(cut)
    packed = np.concatenate([block[:, None], np.packbits(needs, axis=1)], axis=1)
    rows, place, same = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    weight, block = np.bincount(same.ravel(), weight), rows[:, 0]
    # Join neighbouring classes of a block that has too many.
    number, of_block = np.bincount(block)[block], np.arange(len(block))
    of_block -= np.searchsorted(block, block)
    group = np.where(number > _CLASSES, of_block * _CLASSES // number, of_block)
    start = np.flatnonzero(np.diff(group + block * (_CLASSES + 1), prepend=-1))
    weight, block = np.add.reduceat(weight, start), block[start]
    needs = np.logical_or.reduceat(needs[place], start)
    needed = needs.any(axis=1)  # tokens that no block needs are in no class
    block, weight, needs = block[needed], weight[needed], needs[needed]
    index, other = np.nonzero(needs)
    pairs = pair[block[index], other]
    by_pair = np.argsort(pairs, kind="stable")
    first = np.searchsorted(pairs[by_pair], np.arange(pair.max(initial=-1) + 2))
    return Classes(block, weight, first, index[by_pair])
