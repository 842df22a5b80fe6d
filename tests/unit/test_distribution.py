import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2d_mpi.masks.mask import Causal
from a2d_mpi.sharding.distribution import FORMULAS, Distribution

sizes = st.one_of(st.integers(0, 40), st.integers(0, 5000))
# Names with numbers of shards that they have.
kinds = st.one_of(
    st.tuples(st.sampled_from(FORMULAS[:-1]), st.integers(1, 40)),
    st.tuples(st.just("triangle"), st.integers(2, 9).map(lambda t: t * (t - 1) // 2)),
)


@given(kinds, sizes)
def test_every_token_has_one_owner(kind, seqlen):
    """Its tokens are sorted, and few slices have them all."""
    name, nshards = kind
    d, everything = Distribution(name, seqlen, nshards), np.arange(seqlen)
    few = 4 if name == "triangle" else 2
    parts = [d.tokens(p) for p in range(nshards)]
    assert np.array_equal(np.sort(np.concatenate(parts)), everything)
    assert max(d.counts) - min(d.counts) <= few
    for p, (part, count) in enumerate(zip(parts, d.counts, strict=True)):
        assert len(part) == d.counts[p] == count and (np.diff(part) > 0).all()
        found, pieces = np.full(count, -1), list(d.slices(p))
        for mine, whole in pieces:
            found[mine] = everything[whole]
        assert np.array_equal(found, part) and len(pieces) <= few


@given(kinds, sizes, st.integers(0, 5000), st.integers(0, 5000))
def test_places_of_a_span(kind, seqlen, begin, end):
    d = Distribution(kind[0], seqlen, kind[1])
    for p in range(d.nshards):
        tokens = d.tokens(p)
        here = np.flatnonzero((tokens >= begin) & (tokens < end))
        places = d.places(p, ((begin, end),) if begin < end else ())
        assert [x for a, b in places for x in range(a, b)] == here.tolist()
        runs = d.at(p, places)
        assert [x for r in runs for x in r] == tokens[here].tolist()
        assert all(runs)


def tile_areas(rows, cols, seqlen):
    d = Distribution("zigzag", seqlen, rows * cols)
    tokens = [d.tokens(p) for p in range(rows * cols)]
    return [
        Causal().area(
            np.concatenate([tokens[r * cols + x] for x in range(cols)]),
            np.sort(np.concatenate([tokens[y * cols + c] for y in range(rows)])),
        )
        for r in range(rows)
        for c in range(cols)
    ]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3000))
def test_zigzag_balances_causal_on_every_grid(rows, cols, seqlen):
    areas = tile_areas(rows, cols, seqlen)
    assert sum(areas) == seqlen * (seqlen + 1) // 2
    assert max(areas) / np.mean(areas) <= 1 + 3 * rows * cols / seqlen


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (3, 5), (7, 2), (8, 8), (4, 16)])
def test_zigzag_balance_is_exact_where_chunks_are_equal(grid):
    areas = tile_areas(*grid, 2 * grid[0] * grid[1] * 16)
    # Counted in chunk pairs all tiles are equal; the diagonals differ by half a chunk's length.
    assert max(areas) / np.mean(areas) <= 1.01
    contiguous = Distribution("contiguous", 64, 4)
    first, last = (Causal().area(contiguous.tokens(p), np.arange(64)) for p in (0, 3))
    assert last > 5 * first  # the test can tell
