"""Mask shapes: runs of queries, their batches, and what launches are told."""

import math
from unittest.mock import patch

import numpy as np
import pytest
from blocks import dense
from hypothesis import given
from hypothesis import strategies as st

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.kernels import shapes
from a2d_mpi.kernels.graphs import Block
from a2d_mpi.kernels.ragged import LONG, TILE, batches, is_ragged, room, sequences, size_class
from a2d_mpi.kernels.shapes import runs
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.schedules.steps import Attend
from a2d_mpi.schedules.writing import problem_of, write

SHORTEST = 64  # as a2d_mpi.kernels.cudnn, which needs a GPU


def area(run):
    return int(np.maximum(run.end - run.begin, 0).sum())


def calls(text, seqlen, rows, cols, distribution):
    """Return the visible keys of the queries of each kernel call of all ranks, forward."""
    layout, mask = Layout(rows, cols), make_mask(text, seqlen)
    config = AttentionConfig(seqlen, 1, 128, dtype="bfloat16")
    problem = problem_of("attention2d", layout, config, mask, distribution)
    for rank in range(layout.size):
        for program in write("attention2d", "forward", layout, problem, rank):
            for step in program.steps:
                if isinstance(step, Attend):
                    queries, keys = program.tokens(step.queries), program.tokens(step.keys)
                    yield program.mask.intervals(queries, np.sort(keys))


def shares(text, seqlen, rows, cols, distribution=None):
    """Return the share of visible pairs that general runs have, and the numbers of launches."""
    pairs, launches = np.zeros(2, np.int64), np.zeros(2, np.int64)
    for intervals in calls(text, seqlen, rows, cols, distribution):
        for interval in intervals:
            for run in runs(interval, SHORTEST):
                general = run.shape == "general"
                pairs += area(run), general * area(run)
                launches += run.shape != "empty", general
    return pairs[1] / pairs[0], launches


@pytest.mark.parametrize("grid", [(2, 2), (2, 3), (4, 4)])
@pytest.mark.parametrize("distribution", [None, "zigzag"])
@pytest.mark.parametrize(
    "text",
    ["causal", "causal_document", "full_document", "prefix_lm_causal", "prefix_lm_document"]
    + ["sliding_window", "sliding_window_causal", "global_sliding_window"],
)
def test_few_pairs_are_in_general_runs(text, distribution, grid):
    share, (launches, general) = shares(text, 16384, *grid, distribution)
    assert share <= 0.05 and general < launches


def test_striped_shards_have_general_runs():
    """Every second query: the end of the visible keys advances by two."""
    assert shares("causal", 4096, 2, 2, "striped")[0] > 0.49


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([1, 4, 100]))
def test_runs_paint_the_mask(nq, nk, seed, shortest):
    rng = np.random.default_rng(seed)
    steps = rng.choice([0, 1], (2, nq), p=[0.3, 0.7])
    if seed % 7 == 0:  # the same step for several queries, of any size
        steps = np.repeat(rng.integers(-6, 7, (2, nq)), 5, axis=1)[:, :nq]
    begin = np.minimum(np.cumsum(steps[0]) - rng.integers(0, 3), nk).clip(0)
    end = np.minimum(np.cumsum(steps[1]) + rng.integers(0, 5), nk).clip(0)
    if seed % 3 == 0:
        begin[rng.integers(0, nq) :] = 0
    if seed % 5 == 0:  # they see nothing
        begin[nq // 2 :] = end[nq // 2 :]
    interval = begin, np.maximum(begin, end)
    painted, next_row = np.zeros((nq, nk), bool), 0
    most = 60 if seed % 2 else None
    with patch.object(shapes, "CUT", 4):
        found = runs(interval, shortest, most)
    for x in found:
        assert most is None or x.size[0] <= 4 or math.prod(x.size) <= most
        assert x.rows.start == next_row < x.rows.stop
        next_row = x.rows.stop
        i = np.arange(x.rows.stop - x.rows.start)[:, None]
        j = np.arange(x.keys.stop - x.keys.start)
        diagonal = len(j) - len(i) + i
        block = painted[x.rows, x.keys]
        if x.shape == "general":
            painted[x.rows] = dense(((x.begin, x.end),), nk)
            assert not painted[x.rows, : x.keys.start].any()
            assert not painted[x.rows, x.keys.stop :].any()
        elif x.shape == "full":
            block[...] = True
        elif x.shape == "anti-causal":
            assert len(i) <= len(j)
            block |= j >= i
        elif x.shape != "empty":
            assert len(i) <= len(j)
            block |= (j <= diagonal) & ((x.shape == "causal") | (j > diagonal - x.window))
        assert area(x) == painted[x.rows].sum()
    assert next_row == nq
    assert (painted == dense((interval,), nk)).all()


@pytest.mark.parametrize("step", [(0, 4), (0, 5), (1, -3), (1, -4), (2, 0), (2, -4), (-1, 4)])
def test_other_steps_have_no_simple_shape(step):
    i = np.arange(10)
    (run,) = runs((40 + step[0] * i, 100 + step[1] * i), shortest=2)
    assert run.shape == "general"


def test_runs_of_a_window():
    """Its left edge is anti-causal, its right edge causal; what one query sees alone is full."""
    i = np.arange(100)
    found = runs((np.maximum(i - 20, 0), np.minimum(i + 61, 100)))
    assert [(x.shape, x.rows.start) for x in found] == [
        ("causal", 0), ("band", 21), ("anti-causal", 40),
    ]  # fmt: skip
    assert (found[1].window, found[2].keys) == (81, slice(20, 100))


# Batches of runs.


def documents(*lengths):
    ends = np.cumsum(lengths)
    return np.repeat(ends - lengths, lengths), np.arange(ends[-1]) + 1


def shapes_of(interval, shortest=1):
    return [[run.shape for run in batch] for batch in batches(runs(interval, shortest))]


def test_documents_are_batched_by_powers_of_two():
    found = batches(runs(documents(*[20] * 13)))
    assert [len(batch) for batch in found] == [8, 4, 1]
    assert [run.rows.start for batch in found for run in batch] == list(range(0, 260, 20))


def test_what_is_never_together():
    """Runs of other shapes or windows, or with common keys, are not in one batch."""
    i = np.arange(40)
    full = np.where(i < 20, 0, 10), np.where(i < 20, 20, 30)
    assert shapes_of(full) == [["full"], ["full"]]  # both see keys 10 to 20
    apart = np.where(i < 20, 0, 20), np.where(i < 20, 20, 30)
    assert shapes_of(apart) == [["full", "full"]]
    back = np.where(i < 20, 20, 0), np.where(i < 20, 30, 20)
    assert shapes_of(back) == [["full"], ["full"]]
    bands = np.where(i < 20, i, i + 20), np.where(i < 20, i + 4, i + 25)
    assert shapes_of(bands) == [["band"], ["band"]]
    same = np.where(i < 20, i, i + 20), np.where(i < 20, i + 4, i + 24)
    assert shapes_of(same) == [["band", "band"]]
    empty = np.where(i < 20, 0, 10), np.where(i < 20, 0, 30)
    assert shapes_of(empty) == [["empty"], ["full"]]
    general = 3 * i // 2, 3 * i // 2 + 70
    assert shapes_of(general, shortest=60) == [["general"]]


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
    block = Block("float16", 2, 1, headdim=24, headdim_v=16, nq=4, nk=4, shape="full", scale=1.0)
    found = sequences(batch, block, align=4)
    assert found.dtype == np.int64 and found.shape == (7, 4)
    assert found[0].view(np.int32)[:2].tolist() == [3, 4] == found[1].view(np.int32)[:2].tolist()
    rows, keys = np.array([0, 3, 7]), np.array([2, 9, 13])
    expected = rows * 2 * 24, keys * 24, rows * 2 * 16, keys * 16, rows * 2
    assert np.array_equal(found[2:, :3], expected)
