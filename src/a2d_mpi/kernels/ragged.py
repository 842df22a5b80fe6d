"""Batches of runs with one mask shape, for ragged launches of cuDNN ("THD", variable lengths).

Dense launches need a graph for each size, which cuDNN builds in about a second.  Packed documents
would need dozens of graphs, and new ones for every batch of training data.  A ragged launch takes
the lengths as data, and its graph depends on size classes only.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.kernels.graphs import Block
from a2d_mpi.kernels.shapes import Run

TILE = 128  # size of cuDNN's tiles: multiples of it are common sizes, which get dense graphs
LONG = 8192  # a run with this many queries gets a dense graph: few documents are longer


def batches(all_runs: list[Run]) -> list[list[Run]]:
    """Divide runs into batches of neighbouring runs that one launch can compute.

    The runs of a batch have one shape.  Their keys are in order and do not overlap, so that no two
    runs write the same gradient.  The size of a batch is a power of two, so that batches need no
    empty sequences: before 9.25 cuDNN returns NaN for these.

    Parameters
    ----------
    all_runs : list of Run
        The runs of one interval of a mask, as `a2d_mpi.kernels.shapes.runs` returns them.
    """
    groups: list[list[Run]] = []
    for run in all_runs:
        if groups and _follows(groups[-1][-1], run):
            groups[-1].append(run)
        else:
            groups.append([run])
    return [group[a:b] for group in groups for a, b in _powers(len(group))]


def is_ragged(batch: list[Run]) -> bool:
    """Return True if a batch should be one ragged launch, if cuDNN supports it."""
    first = batch[0]
    if len(batch) > 1 or first.shape in ("general", "empty"):
        return len(batch) > 1
    nq, nk = first.size
    return nq < LONG and bool(nq % TILE or nk % TILE)


def size_classes(batch: list[Run]) -> tuple[int, int]:
    """Return the numbers of queries and keys for which the graph of a batch is built."""
    nq, nk = (size_class(max(x)) for x in zip(*(run.size for run in batch)))
    return nq, nk


def size_class(n: int) -> int:
    """Return the longest sequence of the graph that is used for a sequence of length n."""
    return max(TILE, 1 << (n - 1).bit_length())


def room(n: int) -> int:
    """Return the rows of the graph's tensors that are used for n rows: at most a quarter more."""
    step = max(TILE, size_class(n) // 8)
    return -(-n // step) * step


def sequences(batch: list[Run], block: Block, align: int) -> np.ndarray:
    """Return the sizes and offsets of the sequences of a ragged launch.

    Parameters
    ----------
    batch : list of Run
    block : Block
        The work of the launch.
    align : int
        The length of a row of the result is a multiple of it.

    Returns
    -------
    (7, n) int64
        Two rows of lengths, of queries and of keys, both stored as int32.  Five rows of offsets
        in q, k, out, v and the statistics, in elements; the last offset is the end of the last
        sequence.
    """
    n = len(batch)
    numbers = np.zeros((7, -(-(n + 1) // align) * align), np.int64)
    for row, lengths in enumerate(zip(*(run.size for run in batch))):
        numbers[row].view(np.int32)[:n] = lengths
    rows, keys = [run.rows for run in batch], [run.keys for run in batch]
    h, hk, d, e = block.nheads, block.nheads_kv, block.headdim, block.headdim_v
    widths = h * d, hk * d, h * e, hk * e, h
    for row, (spans, width) in enumerate(zip((rows, keys, rows, keys, rows), widths), 2):
        numbers[row, : n + 1] = width * np.array([*(x.start for x in spans), spans[-1].stop])
    return numbers


def _follows(last: Run, run: Run) -> bool:
    """Return True if a run can be in the same batch as the run before it."""
    if run.shape in ("general", "empty") or run.keys.start < last.keys.stop:
        return False
    return run.shape == last.shape and run.window == last.window


def _powers(n: int) -> list[tuple[int, int]]:
    """Cut ``range(n)`` into ranges whose sizes are powers of two, the largest first."""
    bounds, first = [], 0
    while first < n:
        size = 1 << ((n - first).bit_length() - 1)
        bounds.append((first, first + size))
        first += size
    return bounds
