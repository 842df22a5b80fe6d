"""Visible pairs between all parts of a sequence at once, in closed form where there is one.

The cost model asks for the work of every piece of every tile on every grid; each is a sum over
entries of one (parts, parts) matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np

from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.masks import Causal, Full, Mask

SAMPLE = 512  # query tokens of a part that are looked at where there is no closed form
LARGE = 512  # parts, of which the matrices take megabytes


def visible_pairs(mask: Mask, distribution: Distribution) -> tuple[np.ndarray, np.ndarray]:
    """Work between every two parts.

    Parameters
    ----------
    mask : Mask
        Closed forms for `Full` and `Causal`, exact.  Other masks: by ``mask.intervals``, exact for
        parts of up to `SAMPLE` tokens; of larger ones every so many-th query is looked at.
    distribution : Distribution

    Returns
    -------
    area : (parts, parts) int64
        ``area[i, j]``: pairs of a query of part i and a visible key of part j.
    cut : (parts, parts) int64
        Queries of part i whose visible keys begin or end strictly inside a run of part j: the
        ones that a kernel has to mask.
    """
    return (_large if distribution.nshards > LARGE else _small)(mask, distribution)


def _visible_pairs(mask: Mask, distribution: Distribution) -> tuple[np.ndarray, np.ndarray]:
    parts = distribution.nshards
    if isinstance(mask, Full):
        counts = np.array(distribution.counts, np.int64)
        return np.outer(counts, counts), np.zeros((parts, parts), np.int64)
    if isinstance(mask, Causal):
        return _causal(distribution)
    return _by_intervals(mask, distribution)


_small, _large = lru_cache(maxsize=64)(_visible_pairs), lru_cache(maxsize=1)(_visible_pairs)


def by_rows(parts: int) -> Iterator[slice]:
    """Rows of a (parts, parts) matrix, so many at a time that caches hold what comes between."""
    step = max(1, (1 << 15) // parts)
    return (slice(first, first + step) for first in range(0, parts, step))


def _causal(distribution: Distribution) -> tuple[np.ndarray, np.ndarray]:
    """All runs of all parts have the same step, so the staircase has a closed form."""
    parts = distribution.nshards
    runs = [[s for _, s in distribution.slices(part)] for part in range(parts)]
    step = distribution.nshards if distribution.name == "striped" else 1
    area, cut = (np.zeros((parts, parts), np.int64) for _ in range(2))
    starts, counts = np.zeros((2, parts), np.int64), np.zeros((2, parts), np.int64)
    for part, slices in enumerate(runs):
        for slot, s in enumerate(slices):
            starts[slot, part], counts[slot, part] = s.start, len(range(s.start, s.stop, s.step))
    for rows, (q_start, m), (k_start, n) in product(
        by_rows(parts), zip(starts, counts), zip(starts, counts)
    ):
        m_, n_ = m[rows, None], n[None, :]
        # Query i of the run sees clip(i + first + 1, 0, n) keys of the other.
        first = (q_start[rows, None] - k_start[None, :]) // step
        area[rows] += _stairs(m_ + first) - _stairs(first)
        area[rows] -= _stairs(m_ + first - n_) - _stairs(first - n_)
        cut[rows] += np.maximum(np.minimum(m_, n_ - first - 1) - np.maximum(-first, 0), 0)
    return area, cut


def _stairs(x: np.ndarray) -> np.ndarray:
    """1 + 2 + ... + x, 0 for x < 0."""
    x = np.maximum(x, 0)
    return x * (x + 1) // 2


def _by_intervals(mask: Mask, distribution: Distribution) -> tuple[np.ndarray, np.ndarray]:
    parts = distribution.nshards
    tokens = [distribution.tokens(part) for part in range(parts)]
    area, cut = (np.zeros((parts, parts), np.int64) for _ in range(2))
    for i, q in enumerate(tokens):
        sample = q[:: max(1, len(q) // SAMPLE)]
        scale = len(q) / max(1, len(sample))
        for j, k in enumerate(tokens):
            seen = sum(end - begin for begin, end in mask.intervals(sample, k))
            area[i, j] = round(int(np.sum(seen)) * scale)
            cut[i, j] = round(int(np.sum((seen > 0) & (seen < len(k)))) * scale)
    return area, cut
