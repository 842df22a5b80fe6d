"""Batches of runs, and what their launches are told.

``python tests/unit/test_ragged.py`` counts launches and graphs of packed documents.
"""

import numpy as np
import pytest
from test_shapes import SHORTEST, calls

from a2d_mpi.kernels.ragged import (
    LONG,
    TILE,
    batches,
    is_ragged,
    room,
    sequences,
    size_class,
    size_classes,
)
from a2d_mpi.kernels.shapes import runs
from a2d_mpi.masks.patterns import make_mask


def documents(*lengths):
    ends = np.cumsum(lengths)
    return np.repeat(ends - lengths, lengths), np.arange(ends[-1]) + 1


def shapes(interval, shortest=1):
    return [[run.shape for run in batch] for batch in batches(runs(interval, shortest))]


def test_documents_are_batched_by_powers_of_two():
    found = batches(runs(documents(*[20] * 13)))
    assert [len(batch) for batch in found] == [8, 4, 1]
    assert [run.rows.start for batch in found for run in batch] == list(range(0, 260, 20))


def test_what_is_never_together():
    """Runs of other shapes or windows, or with common keys, are not in one batch."""
    i = np.arange(40)
    full = np.where(i < 20, 0, 10), np.where(i < 20, 20, 30)
    assert shapes(full) == [["full"], ["full"]]  # both see keys 10 to 20
    apart = np.where(i < 20, 0, 20), np.where(i < 20, 20, 30)
    assert shapes(apart) == [["full", "full"]]
    back = np.where(i < 20, 20, 0), np.where(i < 20, 30, 20)
    assert shapes(back) == [["full"], ["full"]]
    bands = np.where(i < 20, i, i + 20), np.where(i < 20, i + 4, i + 25)
    assert shapes(bands) == [["band"], ["band"]]
    same = np.where(i < 20, i, i + 20), np.where(i < 20, i + 4, i + 24)
    assert shapes(same) == [["band", "band"]]
    empty = np.where(i < 20, 0, 10), np.where(i < 20, 0, 30)
    assert shapes(empty) == [["empty"], ["full"]]
    general = 3 * i // 2, 3 * i // 2 + 70
    assert shapes(general, shortest=60) == [["general"]]


@pytest.mark.parametrize("seed", range(3))
def test_batches_hold_all_runs_and_no_key_twice(seed):
    tokens = np.arange(4096)
    mask = make_mask(f"causal_document:seed={seed}", 4096)
    queries, keys = tokens[1000:3000], tokens[::2]
    for interval in mask.intervals(queries, keys):
        found = runs(interval, 8)
        made = batches(found)
        assert [run for batch in made for run in batch] == found
        for batch in made:
            assert len(batch).bit_count() == 1
            for a, b in zip(batch, batch[1:]):
                assert a.rows.stop == b.rows.start and a.keys.stop <= b.keys.start


def test_which_launches_are_ragged():
    """A single run is ragged if its size is no multiple of a tile, unless it is long."""

    def ragged(interval):
        return [is_ragged(batch) for batch in batches(runs(interval, TILE))]

    assert ragged(documents(2 * TILE)) == [False]
    assert ragged(documents(2 * TILE + 1)) == ragged(documents(2 * TILE, TILE)) == [True]
    assert ragged(documents(LONG - 1)) == [True] and ragged(documents(LONG + 1)) == [False]
    i = np.arange(TILE)
    assert ragged((0 * i, 0 * i + TILE)) == [False] and ragged((0 * i, 0 * i + 9)) == [True]
    assert ragged((0 * i, 0 * i)) == ragged((2 * i, 2 * i + 9)) == [False]


def test_sizes():
    assert [size_class(n) for n in (1, 128, 129, 1024, 1025)] == [128, 128, 256, 1024, 2048]
    n = np.arange(1, 10000)
    for of, most in ((size_class, 2), (room, 1.25)):
        found = np.array([of(int(x)) for x in n])
        assert (found >= n).all() and (np.diff(found) >= 0).all()
        assert (found <= np.maximum(n * most, n + TILE)).all()
    assert len({room(int(x)) for x in n}) < 30


def test_what_a_launch_reads():
    batch = runs((np.repeat([2, 9], [3, 4]), np.r_[3:6, 10:14]))
    found = sequences(batch, (10, 100, 1), align=4)
    assert found.dtype == np.int64 and found.shape == (5, 4)
    assert found[0].view(np.int32)[:2].tolist() == [3, 4] == found[1].view(np.int32)[:2].tolist()
    assert found[2:, :3].tolist() == [[0, 30, 70], [200, 900, 1300], [0, 3, 7]]


def count(seed, seqlen, rows, cols, known):
    """Launches of all ranks by runs and by batches, and the graphs that are not yet `known`."""
    launches, new = np.zeros(2, int), np.zeros(3, int)
    for (interval,) in calls(f"causal_document:seed={seed}", seqlen, rows, cols):
        for batch in batches(runs(interval, SHORTEST)):
            if batch[0].shape == "empty":
                continue
            kind = batch[0].shape, batch[0].window
            dense = {(*kind, *run.size) for run in batch}
            forward = backward = dense
            if is_ragged(batch):
                forward = {(*kind, len(batch), *size_classes(batch))}
                backward = {(*x, room(len(interval[0]))) for x in forward}
            launches += len(batch), 1 if is_ragged(batch) else len(batch)
            for i, graphs in enumerate((dense, forward, backward)):
                new[i] += len(graphs - known[i])
                known[i] |= graphs
    return launches, new


if __name__ == "__main__":
    for grid in ((1, 1), (2, 2), (4, 4)):
        known = [set(), set(), set()]
        for seed in range(6):
            (alone, batched), new = count(seed, 131072, *grid, known)
            print(
                f"{grid} draw {seed}: {alone} launches, {batched} in batches; graphs: {new[0]}, "
                f"{new[1]} in batches, {new[2]} backward",
                flush=True,
            )
