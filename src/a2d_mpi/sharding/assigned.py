"""A mask that shows only the pairs of blocks that one rank computes."""

from __future__ import annotations

import numpy as np

from a2d_mpi.masks.intervals import Interval, queries_per_key, runs_of
from a2d_mpi.masks.mask import Mask


class Assigned(Mask):
    """A mask, restricted to given pairs of a block of queries and a block of keys.

    Parameters
    ----------
    mask : Mask
        The mask of the whole sequence.
    bounds : (B + 1,) int64
        Block b is the tokens ``[bounds[b], bounds[b + 1])``.
    pairs : (n, 2) int64
        The block of queries and the block of keys of each pair.
    """

    def __init__(self, mask: Mask, bounds: np.ndarray, pairs: np.ndarray) -> None:
        self._mask, self._bounds = mask, bounds
        blocks = len(bounds) - 1
        order = np.lexsort((pairs[:, 1], pairs[:, 0]))
        q, k = pairs[order].T
        # Neighbouring blocks of keys with the same block of queries make one range.
        new = np.ones(len(q), bool)
        new[1:] = (q[1:] != q[:-1]) | (k[1:] != k[:-1] + 1)
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(q)) - 1 if len(q) else first
        of_block = np.bincount(q[first], minlength=blocks)
        place = np.arange(len(first)) - (np.cumsum(of_block) - of_block)[q[first]]
        # Ranges of keys of every block of queries, (ranges, B); unused ranges are empty.
        self._ranges = np.zeros((2, max(1, of_block.max(initial=0)), blocks), np.int64)
        self._ranges[0, place, q[first]] = bounds[k[first]]
        self._ranges[1, place, q[first]] = bounds[k[last] + 1]

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        block = np.searchsorted(self._bounds, q_tokens, side="right") - 1
        needed = self._ranges[1][:, np.unique(block)].any(axis=1) if len(block) else [True]
        return tuple(
            (np.maximum(begin, low[block]), np.minimum(end, high[block]))
            for begin, end in self._mask.visible(q_tokens)
            for low, high, is_needed in zip(*self._ranges, needed)
            if is_needed
        ) or ((np.zeros(len(q_tokens), np.int64),) * 2,)

    def required(
        self, of_keys: bool, first: int, last: int, pairs: np.ndarray
    ) -> list[tuple[int, int]]:
        """Return the tokens of a block that are in a visible pair of the given pairs of blocks.

        Parameters
        ----------
        of_keys : bool
            Whether the tokens are keys; otherwise they are queries.
        first, last : int
            The block is the tokens [first, last).
        pairs : (n, 2) int64
            Pairs of blocks, as in the class.
        """
        if of_keys:
            block = int(np.searchsorted(self._bounds, first, side="right")) - 1
            queries = [
                np.arange(*self._bounds[i : i + 2])
                for i in pairs[pairs[:, 1] == block, 0].tolist()
            ]
            intervals = self.visible(np.concatenate(queries))
            needed = queries_per_key(intervals, last - first, first) > 0
        else:
            intervals = self.visible(np.arange(first, last))
            needed = np.any([end > begin for begin, end in intervals], axis=0)
        return [(first + begin, first + end) for begin, end in runs_of(needed)]
