"""Merging of several calls by the user: values and gradients against float64."""

import numpy as np
import pytest
from cases import SIZE
from dense import plain
from helpers import assert_all, distance

from a2d_mpi import (
    Attention2D,
    IntervalMask,
    RingAttention,
    SharedQuestion,
    merge,
)
from a2d_mpi.core.dtypes import DTYPES

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
    found = {way: [dk.copy(), dv.copy(), dsink.copy()] for way in ("merged", "dlse", "wrong")}
    errors = {way: [] for way in found}

    def compare(way, name, x, tokens):
        scale = np.abs(exact[name][np.isfinite(exact[name])]).max()
        errors[way].append(distance(x, exact[name][tokens]) / scale)

    for first in (PREFIX, PREFIX + OWN):
        own_mask, rows = mask(first, OWN)
        see = IntervalMask(np.zeros(OWN, int), np.where(rows % 7, PREFIX, 0))
        cross = kind(grid, see, seqlen=OWN, seqlen_kv=PREFIX, **options)
        plans = cross, kind(grid, own_mask, seqlen=OWN, **options)
        tokens = first + plans[1].tokens
        q2, k2, v2, dout2 = (x[tokens] for x in whole)
        keys = (k, v), (k2, v2)
        parts = [plans[0].forward(q2, *keys[0], sink), plans[1].forward(q2, *keys[1])]
        out2, lse2 = merge(parts)
        for way in found:
            compare(way, "out", out2, tokens)
            compare(way, "lse", lse2, tokens)
            given = []
            for part_out, part_lse in parts:
                if way == "merged":
                    given.append((dout2, out2, lse2, None))
                    continue
                with np.errstate(invalid="ignore"):
                    w = np.exp(part_lse - lse2)
                dlse = w * (dout2 * (part_out - out2)).sum(-1)
                wrong = way == "wrong"
                given.append((dout2 * w[..., None], part_out, part_lse, None if wrong else dlse))
            (one, more, extra, own_sink), (two, *of_own) = (
                plan.backward(x, q2, *kv, o, s, sink if i == 0 else None, dlse=z)
                for i, (plan, kv, (x, o, s, z)) in enumerate(zip(plans, keys, given))
            )
            for total, x in zip(found[way], (more, extra, own_sink)):
                total += x
            compare(way, "dq", one + two, tokens)
            for name, x in zip(("dk", "dv"), of_own):
                compare(way, name, x, tokens)
    for way, (dk, dv, dsink) in found.items():
        compare(way, "dk", dk, mine)
        compare(way, "dv", dv, mine)
        compare(way, "dsink", comm.allreduce(dsink), slice(None))
    largest = {way: max(comm.allgather(max(x))) for way, x in errors.items()}
    ok = largest["merged"] <= bound and largest["dlse"] <= bound and largest["wrong"] > 1e-3
    assert_all(comm, ok, f"{largest}")


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
    shift = np.where(np.arange(9)[:, None] == 6, 0, np.max(lses, axis=0))
    weights = np.exp(np.array(lses, float) - shift)  # (parts, tokens, heads)
    total = weights.sum(0)
    exact = (weights[..., None] * np.array(outs, float)).sum(0)
    exact /= np.where(total, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        exact_lse = np.log(total) + shift
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
