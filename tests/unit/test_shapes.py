"""Mask shapes: runs of queries, and the sizes of launches."""

import numpy as np
import pytest
from blocks import dense
from hypothesis import given
from hypothesis import strategies as st

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.kernels.shapes import LONGEST, PAIRS, TILE, Run, launch_size, runs
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
    for x in runs(interval, shortest):
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


def test_sizes_of_launches():
    """They are few, and a general launch adds few hidden pairs."""
    rng = np.random.default_rng(0)
    found = {"causal": set(), "general": set()}
    for shape, sizes in found.items():
        for n in rng.integers(1, LONGEST if shape == "general" else 16384, 500).tolist():
            i = np.arange(n)
            keys = slice(0, n if shape == "causal" else int(n + rng.integers(0, 4096)))
            run = Run(slice(0, n), shape, keys, 0, 0 * i, i + 1)
            size = launch_size(run)
            assert all(x <= y for x, y in zip(run.size, size))
            if shape == "general":
                added = size[0] * (size[1] - run.size[1])
                assert added < PAIRS and size[0] < max(2 * n, TILE + 1)
            sizes.add(size)
    assert sorted(found["causal"]) == [(n, n) for n in (1024, 4096, 8192, 16384)]
    assert len(found["general"]) < 25


def test_a_short_band_is_general():
    """Its window may be any number, and each would be another graph."""
    i = np.arange(40)
    assert [x.shape for x in runs((i, i + 7), shortest=40)] == ["band"]
    assert [x.shape for x in runs((i, i + 7), shortest=41)] == ["general"]
