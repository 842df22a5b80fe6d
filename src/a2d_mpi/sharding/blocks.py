"""Counts of visible pairs between contiguous blocks of queries and of keys."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from a2d_mpi.masks.intervals import queries_per_key
from a2d_mpi.masks.mask import Mask

_AT_ONCE = 1 << 16  # queries that are processed together, to bound memory


def cuts(seqlen: int, nblocks: int) -> np.ndarray:
    """Return the bounds of `nblocks` nearly equal blocks of a sequence, (nblocks + 1,) int64."""
    return np.arange(nblocks + 1, dtype=np.int64) * seqlen // nblocks


def chunks(mask: Mask, begin: int, end: int) -> Iterator[tuple[np.ndarray, tuple]]:
    """Yield the queries of [begin, end) with their visible intervals, at most 65536 at a time."""
    for start in range(begin, end, _AT_ONCE):
        tokens = np.arange(start, min(start + _AT_ONCE, end))
        yield tokens, mask.visible(tokens)


def visible_pairs(mask: Mask, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Count the visible pairs of every block of queries with every block of keys.

    Parameters
    ----------
    mask : Mask
    queries : (nq + 1,) int64
        Ascending bounds of the blocks of queries in the sequence.
    keys : (nk + 1,) int64
        Ascending bounds of the blocks of keys.

    Returns
    -------
    (nq, nk) int64

    Notes
    -----
    A query with the interval [begin, end) sees ``(x - begin)+ - (x - end)+`` keys below x, where
    ``(y)+ = max(y, 0)``.  A histogram of the ends of the intervals gives the sum over a block of
    queries for all bounds x at once.  No pair is listed: the work is ``N log nk + nq nk``.
    """
    nq, nk = len(queries) - 1, len(keys) - 1
    number = np.zeros((nq, nk + 2))
    total = np.zeros((nq, nk + 2))
    for tokens, intervals in chunks(mask, int(queries[0]), int(queries[-1])):
        block = np.searchsorted(queries, tokens, side="right") - 1
        for begin, end in intervals:
            begin = np.clip(begin, keys[0], keys[-1])
            end = np.maximum(begin, np.clip(end, keys[0], keys[-1]))
            for place, sign in ((begin, 1.0), (end, -1.0)):
                # This end of an interval counts for all bounds x >= place, from `first` on.
                first = block * (nk + 2) + np.searchsorted(keys, place)
                number += sign * np.bincount(first, minlength=number.size).reshape(number.shape)
                weight = np.bincount(first, weights=place, minlength=number.size)
                total += sign * weight.reshape(number.shape)
    below = np.cumsum(number, axis=1)[:, : nk + 1] * keys - np.cumsum(total, axis=1)[:, : nk + 1]
    return np.rint(np.diff(below, axis=1)).astype(np.int64)


def borders(mask: Mask, seqlen: int) -> np.ndarray:
    """Find the places in the sequence that no visible pair crosses, for example ends of documents.

    Returns
    -------
    (n,) int64
        The places in ascending order, with 0 and `seqlen`.  No query before a place sees a key
        after it, and no query after it sees a key before it.
    """
    crossing = np.zeros(seqlen + 1, np.int64)
    for tokens, intervals in chunks(mask, 0, seqlen):
        for begin, end in intervals:
            begin, end = np.clip(begin, 0, seqlen), np.clip(end, 0, seqlen)
            sees = end > begin
            first, last = np.minimum(begin, tokens)[sees], np.maximum(end - 1, tokens)[sees]
            crossing += queries_per_key([(first + 1, last + 1)], seqlen + 1)
    return np.union1d(np.flatnonzero(crossing == 0), [0, seqlen]).astype(np.int64)


def along_documents(mask: Mask, seqlen: int, nblocks: int) -> np.ndarray:
    """Return the bounds of about `nblocks` blocks that follow the borders of a mask's documents.

    A long document is cut into equal blocks; short documents share a block.  No block has more
    than ``seqlen / nblocks`` tokens, rounded up.  There are fewer than ``2 nblocks`` blocks.
    """
    most = max(1, -(-seqlen // nblocks))
    bounds, last = [0], 0
    for border in borders(mask, seqlen)[1:].tolist():
        length = border - last
        if length > most:
            if last > bounds[-1]:
                bounds.append(last)
            pieces = -(-length // most)
            bounds += [last + length * i // pieces for i in range(1, pieces + 1)]
        elif border - bounds[-1] > most:
            bounds.append(last)
        last = border
    if seqlen > bounds[-1]:
        bounds.append(seqlen)
    return np.array(bounds, np.int64)
