"""The balanced distribution has every token once, even tiles, and the same runs in every call."""

import numpy as np
import pytest
from helpers import deeper
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Intervals, owners_of, tile_areas

from a2d_mpi.masks.compiled import compile_mask
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.masks.patterns import PATTERNS, make_mask
from a2d_mpi.sharding.balance import balanced
from a2d_mpi.sharding.pairs import visible_pairs

N = 16384


def deal(mask, seqlen, *shape):
    """Return the runs of every rank of the balanced distribution."""
    return balanced(compile_mask(mask, seqlen, seqlen), *shape)


def uneven(mask, shards, rows, cols, heads=1):
    """Return the largest over the mean area of the tiles."""
    owner = owners_of(shards, sum(len(x) for runs in shards for x in runs)) // heads
    area = tile_areas(mask, owner, rows, cols)
    return area.max() / area.mean()


@pytest.mark.parametrize(
    "shape", deeper([(4, 4), (8, 8), (2, 3), (16, 1), (1, 6)], [(4, 4)]), ids=str
)
@pytest.mark.parametrize("name", PATTERNS)
def test_tiles_are_even(name, shape):
    mask = make_mask(name, N)
    found = uneven(mask, deal(mask, N, *shape), *shape)
    assert found <= 1.05, f"{name} on {shape}: {found:.3f}"


def test_plain_masks_keep_their_distributions():
    assert deal(Full(), 64, 2, 2) == tuple((range(16 * p, 16 * p + 16),) for p in range(4))
    zigzag = tuple((range(8 * p, 8 * p + 8), range(56 - 8 * p, 64 - 8 * p)) for p in range(3))
    assert deal(Causal(), 64, 2, 2)[:3] == zigzag
    assert deal(Causal(), 64, 2, 2)[3] == (range(24, 40),)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(0, 90), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_every_token_has_one_owner(data, seqlen, rows, cols, heads):
    ends = st.lists(st.integers(-3, 95), min_size=2 * seqlen, max_size=2 * seqlen)
    mask = Intervals(*np.array(data.draw(ends), np.int64).reshape(1, 2, seqlen))
    shards = deal(mask, seqlen, rows, cols, heads)
    owners_of(shards, seqlen)
    assert shards == deal(mask, seqlen, rows, cols, heads)
    assert len(shards) == rows * cols * heads
    for runs in shards:
        assert all(len(x) for x in runs)
        assert all(a.stop <= b.start for a, b in zip(runs, runs[1:]))
    counts = [sum(map(len, runs)) for runs in shards]
    longest = -(-seqlen // (rows * cols))
    assert max(counts) - min(counts) <= longest


@pytest.mark.parametrize("heads", [2, 3])
def test_heads_share_the_runs_of_a_position(heads):
    mask = make_mask("causal_document", N)
    alone = owners_of(deal(mask, N, 2, 3), N)
    shared = deal(mask, N, 2, 3, heads)
    assert (owners_of(shared, N) // heads == alone).all()
    counts = [sum(map(len, runs)) for runs in shared]
    assert max(counts) - min(counts) <= 4


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 40))
def test_visible_pairs(data, seqlen):
    """Intervals may be out of range, but the intervals of one query do not overlap."""
    array = st.lists(st.integers(-3, 45), min_size=seqlen, max_size=seqlen)
    a, b, c, d = (np.array(data.draw(array)) for _ in range(4))
    mask = Intervals((a, b), (np.maximum(c, np.maximum(a, b)), d))
    cuts = st.lists(st.integers(0, seqlen), max_size=5).map(
        lambda x: np.array([0, *sorted(x), seqlen])
    )
    bounds = data.draw(cuts)
    seen = mask.dense(np.arange(seqlen), np.arange(seqlen))
    found = visible_pairs(compile_mask(mask, seqlen, seqlen), bounds)
    for i, q in enumerate(map(slice, bounds[:-1], bounds[1:])):
        for j, k in enumerate(map(slice, bounds[:-1], bounds[1:])):
            assert found[i, j] == seen[q, k].sum()
