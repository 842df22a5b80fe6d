import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from a2d_mpi.core.merge import merge

N, H, D = 4, 2, 3
lses = hnp.arrays(
    np.float32,
    (N, H),
    elements=st.one_of(st.just(-np.inf), st.floats(-1e4, 1e4, width=32)),
)
outs = hnp.arrays(np.float32, (N, H, D), elements=st.floats(-8, 8, width=32))


def merged(*partials):
    (out, lse), *others = [(o.copy(), s.copy()) for o, s in partials]
    rest = np.zeros_like(lse)
    for o, s in others:
        merge(out, lse, rest, o, s)
    return out, lse


def partial(out, lse):
    # A partial result that saw nothing has out 0.
    return np.where(np.isneginf(lse)[..., None], 0, out).astype(out.dtype), lse


def exact(*partials):
    """Merge by the definition in float64, without a shift per pair."""
    lse = np.stack([s for _, s in partials]).astype(float)
    shift = lse.max(axis=0)
    shift[np.isneginf(shift)] = 0
    weights = np.exp(lse - shift)
    total = weights.sum(axis=0)
    out = sum(w[..., None] * o for w, (o, _) in zip(weights, partials))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total[..., None] > 0, out / total[..., None], 0), np.log(total) + shift


@given(outs, lses, outs, lses, outs, lses)
def test_merge_is_the_softmax_of_all_keys(a, la, b, lb, c, lc):
    parts = [partial(a, la), partial(b, lb), partial(c, lc)]
    out, lse = merged(*parts)
    right = merged(parts[0], merged(*parts[1:]))
    expected_out, expected_lse = exact(*parts)
    for o, s in ((out, lse), right):
        assert np.array_equal(np.isneginf(s), np.isneginf(expected_lse))
        seen = ~np.isneginf(s)
        # lse is rounded to float32: its own size times eps, and what that makes of the weights.
        slack = 4 * np.finfo(np.float32).eps * (1 + np.abs(expected_lse[seen]))
        assert (np.abs(s[seen] - expected_lse[seen]) <= slack).all()
        assert (np.abs(o - expected_out).max(axis=-1)[seen] <= 16 * slack).all()
        assert (o[~seen] == 0).all()


@given(outs, lses)
def test_identity(a, la):
    a, la = partial(a, la)
    nothing = np.zeros_like(a), np.full_like(la, -np.inf)
    for out, lse in (merged((a, la), nothing), merged(nothing, (a, la))):
        assert np.array_equal(out, a)
        assert np.array_equal(lse, la)


def test_huge_logits_do_not_overflow():
    ones = np.ones((1, 1, 2), np.float32)
    high, low = (np.full((1, 1), x, np.float32) for x in (1e4, -1e4))
    out, lse = merged((ones, high), (3 * ones, low))
    assert out.tolist() == [[[1, 1]]] and lse.tolist() == [[1e4]]
    out, lse = merged((ones, low), (3 * ones, low))
    assert out.tolist() == [[[2, 2]]] and lse[0, 0] == pytest.approx(-1e4 + np.log(2))


def test_nan_is_not_hidden():
    ones, zero = np.ones((1, 1, 1)), np.zeros((1, 1))
    out, lse = merged((ones, zero), (ones, zero * np.nan))
    assert np.isnan(out).all() and np.isnan(lse).all()


def test_lse_does_not_get_worse_with_the_number_of_merges():
    rng = np.random.default_rng(0)
    parts = [
        (np.zeros((50, 4, 1), np.float32), rng.standard_normal((50, 4)).astype(np.float32))
        for _ in range(500)
    ]
    _, lse = merged(*parts)
    true = np.log(sum(np.exp(s.astype(float)) for _, s in parts))
    assert np.abs(lse - true).max() <= np.spacing(np.float32(true.max())) / 2 * 1.01
