"""Placement of blocks: every pair once, exact traffic, even work, few bytes."""

from unittest.mock import patch

import numpy as np
import pytest
from helpers import deeper
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    Intervals,
    best_grid,
    contiguous,
    documents,
    heavy_tailed,
    many_masks,
    owners_of,
    zigzag,
)

from a2d_mpi.masks.mask import Causal, Full, IntervalMask
from a2d_mpi.sharding import placement
from a2d_mpi.sharding.placement import place

N = 16384


@pytest.fixture(autouse=True)
def little_search():
    """Search a tenth as long as `place` does; the limits of these tests are wider, too."""
    with patch.object(placement, "_BUDGET", 3_000_000):
        yield


def figures(mask, seqlen, found, kv_share):
    """Count visible pairs and traffic of every rank from the dense mask."""
    seen = mask.dense(np.arange(seqlen), np.arange(seqlen))
    computed = np.zeros_like(seen, dtype=int)
    work, received, sent = np.zeros((3, found.ranks))
    owner = np.repeat(found.owner, found.demand.tokens)
    for rank in range(found.ranks):
        here = np.zeros_like(seen)
        for i, j in found.demand.pairs[found.rank == rank]:
            here[
                found.demand.blocks[i].start : found.demand.blocks[i].stop,
                found.demand.blocks[j].start : found.demand.blocks[j].stop,
            ] = 1
        here &= seen
        computed += here
        work[rank] = here.sum()
        for need, elements, back in (
            (here.any(axis=1), 1, 1),
            (here.any(axis=0), 2 * kv_share, 0),
        ):
            need &= owner != rank
            of = np.bincount(owner[need], None, found.ranks)
            received[rank] += elements * need.sum()
            sent += elements * of
            sent[rank] += back * need.sum()
            received += back * of
    assert (computed == seen).all(), "a visible pair is not computed exactly once"
    return work, received, sent


def largest(found):
    return max(found.received.max(), found.sent.max())


def checked(found, name=""):
    """Assert that work and tokens are even."""
    work, tokens = found.work, found.tokens
    assert work.max() <= 1.05 * work.mean(), f"{name}: work {work.max() / work.mean():.3f}"
    block = max(map(len, found.demand.blocks))
    assert tokens.max() <= max(1.05 * tokens.mean(), tokens.mean() + block), name
    return found


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 60),
    st.integers(1, 7),
    st.sampled_from([1, 0.25]),
)
def test_every_pair_is_computed_once(seed, seqlen, ranks, kv_share):
    """Intervals may be out of range, but those of one query do not overlap."""
    a, b, c, d = np.random.default_rng(seed).integers(-3, 65, (4, seqlen))
    mask = Intervals((a, b), (np.maximum(c, np.maximum(a, b)), d))
    with patch.object(placement, "_BUDGET", 60_000):
        found = place(mask, seqlen, ranks, kv_share)
        again = place(mask, seqlen, ranks, kv_share)
    owners_of(found.runs(), seqlen)
    assert (np.repeat(found.owner, found.demand.tokens) == owners_of(found.runs(), seqlen)).all()
    work, received, sent = figures(mask, seqlen, found, kv_share)
    assert (found.work == work).all()
    np.testing.assert_allclose(found.received, received)
    np.testing.assert_allclose(found.sent, sent)
    for name in ("owner", "rank"):
        assert (getattr(found, name) == getattr(again, name)).all()
    assert (found.demand.pairs == again.demand.pairs).all()


@pytest.mark.parametrize("name", list(many_masks(64, 0, 8)))
def test_traffic_is_counted_to_the_token(name):
    mask = many_masks(1024, 3, 16)[name]
    with patch.object(placement, "_BUDGET", 300_000):
        found = place(mask, 1024, 6, 0.25)
    work, received, sent = figures(mask, 1024, found, 0.25)
    assert (found.work == work).all()
    np.testing.assert_allclose(found.received, received)
    np.testing.assert_allclose(found.sent, sent)


@pytest.mark.parametrize("name", deeper(many_masks(64, 0, 8), ["causal_document"]))
def test_even_work_and_no_more_traffic_than_grids(name):
    mask = many_masks(N, 0)[name]
    found = checked(place(mask, N, 16), name)
    grids = min(best_grid(mask, N, 16, x(N, 16)) for x in (contiguous, zigzag))
    assert largest(found) <= 1.01 * grids, f"{name}: {largest(found) / grids:.3f} of the best grid"


@pytest.mark.parametrize("ranks", deeper([8, 16, 64], [8]))
def test_causal(ranks):
    found = checked(place(Causal(), N, ranks))
    grid = best_grid(Causal(), N, ranks, zigzag(N, ranks))
    assert largest(found) <= 0.9 * grid, f"{ranks}: {largest(found) / grid:.3f} of the best grid"


def test_equal_documents_stay():
    found = checked(place(documents([N // 64] * 64), N, 16))
    assert largest(found) == 0


def test_window_moves_little():
    i = np.arange(N)
    mask = IntervalMask(np.maximum(i - N // 64 + 1, 0), i + 1)
    assert largest(checked(place(mask, N, 16))) <= 0.06 * N


@pytest.mark.parametrize("seed", [0, 3])
def test_heavy_tailed_documents(seed):
    mask = documents(heavy_tailed(N, seed))
    found = checked(place(mask, N, 16))
    grids = min(best_grid(mask, N, 16, x(N, 16)) for x in (contiguous, zigzag))
    assert largest(found) <= grids, f"{largest(found) / grids:.3f} of the best grid"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ranks": 0}, "one rank"),
        ({"seqlen": 0}, "at least one token"),
        ({"kv_share": 0}, "kv_share"),
        ({"kv_share": 1.5}, "kv_share"),
        (
            {"mask": IntervalMask(np.zeros(4, int), np.ones(4, int))},
            "of 4 queries, but the sequence has 64",
        ),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        place(**{"mask": Full(), "seqlen": 64, "ranks": 2, **change})
