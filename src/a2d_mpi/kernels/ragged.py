"""Runs of one mask shape, batched into ragged launches of cuDNN ("THD", variable lengths).

Each size of a dense launch is a graph of its own, which cuDNN builds in about a second: packed
documents would have dozens of them, and others in every batch of training data.  The lengths of a
ragged launch are data instead, and its graph depends on size classes alone.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.kernels.shapes import Run

TILE = 128  # cuDNN's tiles: multiples recur, and have dense graphs
LONG = 8192  # queries of a run that has a dense graph whatever its size: a document seldom does
ARRAYS = 5  # of numbers that a ragged launch takes


def batches(found: list[Run]) -> list[list[Run]]:
    """Neighbouring runs, one to a list or together where one launch can do them.

    Together are runs of one shape whose keys do not overlap and are in order, so that no two write
    to one gradient, by powers of two: a batch of no work is NaN to cuDNN before 9.25.

    Parameters
    ----------
    found : list of Run
        Of one interval of a mask, as `a2d_mpi.kernels.shapes.runs` returns them.
    """
    groups: list[list[Run]] = []
    for run in found:
        if groups and _follows(groups[-1][-1], run):
            groups[-1].append(run)
        else:
            groups.append([run])
    return [group[a:b] for group in groups for a, b in _powers(len(group))]


def is_ragged(batch: list[Run]) -> bool:
    """Tell whether a batch is to be launched as one, if cuDNN can."""
    first = batch[0]
    if len(batch) > 1 or first.shape in ("general", "empty"):
        return len(batch) > 1
    nq, nk = first.size
    return nq < LONG and bool(nq % TILE or nk % TILE)


def size_classes(batch: list[Run]) -> tuple[int, int]:
    """Queries and keys that the graph for a batch is built for."""
    nq, nk = (size_class(max(x)) for x in zip(*(run.size for run in batch)))
    return nq, nk


def size_class(n: int) -> int:
    """The longest sequence that a graph for one of length n is built for."""
    return max(TILE, 1 << (n - 1).bit_length())


def room(n: int) -> int:
    """Rows of a tensor for which a graph is built, for n of them: a quarter more at most."""
    step = max(TILE, size_class(n) // 8)
    return -(-n // step) * step


def sequences(batch: list[Run], widths: tuple[int, int, int], align: int) -> np.ndarray:
    """Figures of its sequences that a ragged launch reads.

    Parameters
    ----------
    batch : list of Run
    widths : (int, int, int)
        Elements of a row of q, of k, and of the statistics.
    align : int
        Numbers that a row of the result is a multiple of.

    Returns
    -------
    (5, n) int64
        Lengths of queries and of keys, each as int32; where sequences begin in q, k and the
        statistics, as elements, and where the last one ends.
    """
    n = len(batch)
    found = np.zeros((ARRAYS, -(-(n + 1) // align) * align), np.int64)
    for row, lengths in enumerate(zip(*(run.size for run in batch))):
        found[row].view(np.int32)[:n] = lengths
    rows, keys = [run.rows for run in batch], [run.keys for run in batch]
    for row, (spans, width) in enumerate(zip((rows, keys, rows), widths, strict=True), 2):
        found[row, : n + 1] = width * np.array([*(x.start for x in spans), spans[-1].stop])
    return found


def _follows(last: Run, run: Run) -> bool:
    """Tell whether a run can be in one batch with the one before it."""
    if run.shape in ("general", "empty") or run.keys.start < last.keys.stop:
        return False
    return run.shape == last.shape and run.window == last.window


def _powers(n: int) -> list[tuple[int, int]]:
    """Bounds of parts of n things, each a power of two, the largest first."""
    found, first = [], 0
    while first < n:
        size = 1 << ((n - first).bit_length() - 1)
        found.append((first, first + size))
        first += size
    return found
