"""Merging of partial results, in plans and by the user, against float64."""

import numpy as np
import pytest
from cases import SIZE
from dense import plain
from helpers import assert_all, distance
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from a2d_mpi import Attention2D, IntervalMask, RingAttention, SharedQuestion, merge
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.merge import merge as merge_into

PREFIX, OWN, HEADS, KV, D = 83, 30, 6, 2, 16
GRID = {1: (1, 1), 4: (2, 2), 6: (2, 3)}.get(SIZE, (1, SIZE))


@pytest.mark.mpi
@pytest.mark.grids
@pytest.mark.parametrize("dtype, bound", [("float64", 1e-13), ("float32", 1e-6)])
@pytest.mark.parametrize("kind", [Attention2D, RingAttention])
def test_a_prefix_and_two_continuations(comm, grid_of, dtype, bound, kind):
    """Backward calls with the merged out and lse give the gradients of one sequence."""
    grid, rng = grid_of(*GRID), np.random.default_rng(0)
    seqlen = PREFIX + 2 * OWN
    shapes = (seqlen, HEADS), (seqlen, KV), (seqlen, KV), (seqlen, HEADS)
    whole = [rng.standard_normal((*x, D)).astype(dtype) for x in shapes]
    sink = rng.standard_normal(HEADS).astype(dtype)
    visible = SharedQuestion([0, PREFIX, PREFIX + OWN, seqlen]).dense(*[np.arange(seqlen)] * 2)
    visible[::7] = False  # masked rows, of which lse is the sink
    exact = plain(whole, visible, D**-0.5, sink=sink)
    options = {
        "nheads": HEADS, "nheads_kv": KV, "headdim": D, "dtype": dtype, "distribution": "zigzag",
    }  # fmt: skip

    def mask(first, n):
        rows = np.arange(first, first + n)
        causal = np.arange(n) + 1
        return IntervalMask(np.zeros(n, int), np.where(rows % 7, causal, 0)), rows

    of_prefix = kind(grid, mask(0, PREFIX)[0], seqlen=PREFIX, **options)
    mine = of_prefix.tokens
    q, k, v, dout = (x[mine] for x in whole)
    out, lse = of_prefix.forward(q, k, v, sink)
    _, dk, dv, dsink = of_prefix.backward(dout, q, k, v, out, lse, sink)
    errors = []

    def compare(name, x, tokens):
        scale = np.abs(exact[name][np.isfinite(exact[name])]).max()
        errors.append(distance(x, exact[name][tokens]) / scale)

    for first in (PREFIX, PREFIX + OWN):
        own_mask, rows = mask(first, OWN)
        see = IntervalMask(np.zeros(OWN, int), np.where(rows % 7, PREFIX, 0))
        cross = kind(grid, see, seqlen=OWN, seqlen_kv=PREFIX, **options)
        own = kind(grid, own_mask, seqlen=OWN, **options)
        tokens = first + own.tokens
        q2, k2, v2, dout2 = (x[tokens] for x in whole)
        out2, lse2 = merge([cross.forward(q2, k, v, sink), own.forward(q2, k2, v2)])
        dq2, more_dk, more_dv, more_dsink = cross.backward(dout2, q2, k, v, out2, lse2, sink)
        own_dq, dk2, dv2 = own.backward(dout2, q2, k2, v2, out2, lse2)
        for total, x in ((dk, more_dk), (dv, more_dv), (dsink, more_dsink), (dq2, own_dq)):
            total += x
        found = {"out": out2, "lse": lse2, "dq": dq2, "dk": dk2, "dv": dv2}
        for name, x in found.items():
            compare(name, x, tokens)
    compare("dk", dk, mine)
    compare("dv", dv, mine)
    compare("dsink", comm.allreduce(dsink), slice(None))
    assert_all(comm, max(errors) <= bound, f"{errors}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(cupy, dtype):
    """Three parts, one of them masked, merge as on the host and are rounded once."""
    rng, bad = np.random.default_rng(0), []
    outs = [rng.standard_normal((9, 4, 8)).astype(DTYPES[dtype]) for _ in range(3)]
    lses = [3 * rng.standard_normal((9, 4)).astype(np.float32) for _ in range(3)]
    outs[1][2], lses[1][2], outs[2][4], lses[2][4] = 0, -np.inf, 0, -np.inf
    for x, y in zip(outs, lses):
        x[6], y[6] = 0, -np.inf
    kept = [x.copy() for x in outs]
    exact, exact_lse = exact_of(*zip(outs, lses))
    half = 2.0**-8 if dtype == "bfloat16" else 1e-6
    host = merge(list(zip(outs, lses)))
    gpu = merge([(cupy.asarray(x), cupy.asarray(y)) for x, y in zip(outs, lses)])
    for name, (out, lse) in {"host": host, "gpu": map(cupy.asnumpy, gpu)}.items():
        off = np.abs(out.astype(float) - exact) > (1 + 1e-5) * half * np.abs(exact) + 1e-7
        bad += [f"out of {name}"] * (out.dtype != DTYPES[dtype] or bool(off.any()))
        bad += [f"lse of {name}"] * bool(distance(lse, exact_lse) > 2e-6)
    assert not bad and all(np.array_equal(x, y) for x, y in zip(outs, kept))


def test_bad_parts():
    out, lse = np.zeros((3, 2, 4), np.float32), np.zeros((3, 2), np.float32)
    for parts, text in (
        ([], "one shape and dtype, got \\[\\]"),
        ([(out, lse), (out[:2], lse[:2])], "one shape and dtype, got .*\\(2, 2, 4\\)"),
        ([(out, lse), (out.astype(float), lse)], "one shape and dtype, got .*float64"),
        ([(out, lse.astype(float))], "dtype float32, got \\(3, 2\\) and float64"),
        ([(out, lse[:, :1])], "must have shape \\(3, 2\\)"),
    ):
        with pytest.raises(ValueError, match=text):
            merge(parts)


# Merges of two partial results, as plans do them.

ROWS = 4, 2
lses = hnp.arrays(
    np.float32, ROWS, elements=st.one_of(st.just(-np.inf), st.floats(-1e4, 1e4, width=32))
)
outs = hnp.arrays(np.float32, (*ROWS, 3), elements=st.floats(-8, 8, width=32))


def merged(*partials):
    (out, lse), *others = [(o.copy(), s.copy()) for o, s in partials]
    rest = np.zeros_like(lse)
    for o, s in others:
        merge_into(out, lse, rest, o, s)
    return out, lse


def partial(out, lse):
    # A partial result that saw nothing has out 0.
    return np.where(np.isneginf(lse)[..., None], 0, out).astype(out.dtype), lse


def exact_of(*partials):
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
    expected_out, expected_lse = exact_of(*parts)
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
