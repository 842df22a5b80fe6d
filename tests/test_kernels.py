"""The NumPy kernel against the float64 reference."""

from functools import cache

import numpy as np
import pytest
from dense import bounds, out_of_bounds
from dense import plain as results
from helpers import deeper, distance
from hypothesis import given, settings
from hypothesis import strategies as st

from a2d_mpi.comm.transport import HostTransport
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.kernel_memory import BLOCK_K, BLOCK_Q
from a2d_mpi.core.merge import merge
from a2d_mpi.devices.host import HOST
from a2d_mpi.kernels import make_kernel
from a2d_mpi.kernels.blocks import Blocker
from a2d_mpi.kernels.numpy import NumpyKernel
from a2d_mpi.masks.mask import Causal, Full, IntervalMask

TENSORS = ("out", "lse", "dq", "dk", "dv")
KINDS = [("numpy", np.float32), ("numba", np.float32), ("numpy", np.float64)]


def dense(intervals, nk):
    keys = np.arange(nk)
    return sum((keys >= b[:, None]) & (keys < e[:, None]) for b, e in intervals).astype(bool)


def run(kernel, q, k, v, dout, intervals, exact, **options):
    """Return all results of a block; the backward pass gets the statistics of `exact`."""
    out, lse = np.empty_like(q), np.empty(q.shape[:2], q.dtype)
    kernel.forward(q, k, v, intervals, out, lse, **options)
    delta = (dout * exact["out"]).sum(-1).astype(q.dtype)
    gradients = [np.zeros_like(x) for x in (q, k, v)]
    exact_lse = exact["lse"].astype(q.dtype)
    kernel.backward(dout, q, k, v, exact_lse, delta, intervals, *gradients, **options)
    return dict(zip(TENSORS, (out, lse, *gradients)))


def plain(q, k, v, dout, intervals, scale, dtype):
    return results((q, k, v, dout), dense(intervals, len(k)), scale, dtype=dtype)


def failures(found, q, k, v, dout, intervals, scale, exact):
    """Return the names of results that are out of bounds."""
    inputs, visible = (q, k, v, dout), dense(intervals, len(k))
    return out_of_bounds(found, exact, bounds(inputs, visible, scale, None, None, exact, q.dtype))


def tensors(nq, nk, nheads, nheads_kv, d, dtype, size=1.0, seed=0):
    rng = np.random.default_rng(seed)
    q, dout = (rng.standard_normal((nq, nheads, d)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((nk, nheads_kv, d)).astype(dtype) for _ in range(2))
    return q * dtype(size), k, v, dout


def random_intervals(rng, nq, nk, kind):
    if kind == "full":
        return ((np.zeros(nq, int), np.full(nq, nk)),)
    if kind == "causal":
        return ((np.zeros(nq, int), np.minimum(np.arange(nq) + 1, nk)),)
    begin = rng.integers(0, nk + 1, nq)
    end = np.maximum(begin, rng.integers(0, nk + 1, nq))
    if kind == "one":
        return ((begin, end),)
    return ((begin, end), (end, np.minimum(end + 5, nk)))


@pytest.mark.parametrize("name, dtype", KINDS)
@pytest.mark.parametrize("kind", ["full", "causal", "one", "two"])
@pytest.mark.parametrize("size", deeper([1.0, 40.0, 2500.0], [40.0]))  # logits to 10, 500, 3e4
@pytest.mark.parametrize("heads", deeper([(2, 2, 7), (4, 1, 32)], [(4, 1, 32)]))
@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (600, 5), (601, 1100)])
def test_kernel(name, dtype, kind, size, heads, shape):
    q, k, v, dout = tensors(*shape, *heads, dtype, size)
    scale = heads[2] ** -0.5
    intervals = random_intervals(np.random.default_rng(1), *shape, kind)
    exact = plain(q, k, v, dout, intervals, scale, np.float64)
    kernel = make_kernel(name, HOST, np.dtype(dtype), scale)
    assert kernel.name == name
    found = run(kernel, q, k, v, dout, intervals, exact)
    assert not failures(found, q, k, v, dout, intervals, scale, exact)


@settings(max_examples=60)
@given(
    st.integers(0, 40), st.integers(0, 60), st.integers(1, 3), st.integers(1, 3),
    st.sampled_from(["full", "causal", "one", "two"]), st.sampled_from([0.1, 30.0]),
    st.integers(1, 20), st.integers(1, 40), st.integers(0, 99),
)  # fmt: skip
def test_kernel_with_any_blocks(nq, nk, group, nheads_kv, kind, size, block_q, block_k, seed):
    q, k, v, dout = tensors(nq, nk, group * nheads_kv, nheads_kv, 4, np.float64, size, seed)
    intervals = random_intervals(np.random.default_rng(seed), nq, nk, kind)
    kernel = NumpyKernel(np.float64, 0.5, block_q=block_q, block_k=block_k)
    exact = plain(q, k, v, dout, intervals, 0.5, np.float64)
    found = run(kernel, q, k, v, dout, intervals, exact)
    assert not failures(found, q, k, v, dout, intervals, 0.5, exact)


def test_one_kernel_object_serves_all_shapes():
    kernel = NumpyKernel(np.float64, 0.5, block_q=8, block_k=16)
    for nq, nk in ((30, 50), (3, 2), (0, 5), (40, 60), (5, 0)):
        q, k, v, dout = tensors(nq, nk, 2, 1, 4, np.float64)
        intervals = random_intervals(np.random.default_rng(0), nq, nk, "one")
        exact = plain(q, k, v, dout, intervals, 0.5, np.float64)
        found = run(kernel, q, k, v, dout, intervals, exact)
        assert not failures(found, q, k, v, dout, intervals, 0.5, exact)


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_both_ways_of_taking_the_exponential_agree(name):
    q, k, v, dout = tensors(300, 600, 2, 2, 16, np.float32)
    intervals = random_intervals(np.random.default_rng(0), 300, 600, "one")
    bounded, general = (make_kernel(name, HOST, np.dtype("f4"), 0.25) for _ in range(2))
    general._bounded = lambda *_: False
    assert bounded._bounded(q, k, v, None, None)
    exact = plain(q, k, v, dout, intervals, 0.25, np.float64)
    for kernel in (bounded, general):
        found = run(kernel, q, k, v, dout, intervals, exact)
        assert not failures(found, q, k, v, dout, intervals, 0.25, exact)


@pytest.mark.parametrize("offset", [-9e3, 9e3])
def test_rows_far_from_zero(offset):
    """Logits of a row may be far from zero; a shift of 0 would lose or overflow them."""
    q, k, v, dout = tensors(50, 80, 1, 1, 4, np.float64)
    q[..., 0], k[..., 0] = 100, offset / 100
    intervals = random_intervals(np.random.default_rng(0), 50, 80, "causal")
    exact = plain(q, k, v, dout, intervals, 1.0, np.float64)
    found = run(NumpyKernel(np.float64, 1.0, None, 8, 16), q, k, v, dout, intervals, exact)
    assert not failures(found, q, k, v, dout, intervals, 1.0, exact)
    assert np.isfinite(found["lse"]).all()


def test_rising_maximum():
    """Each block of keys has larger logits than before, so the shift must rise."""
    q, k, v, dout = tensors(20, 200, 1, 1, 4, np.float64, 0.1)
    q[..., 0], k[..., 0] = 1, np.linspace(-400, 400, 200)[:, None]
    intervals = random_intervals(np.random.default_rng(0), 20, 200, "full")
    exact = plain(q, k, v, dout, intervals, 1.0, np.float64)
    found = run(NumpyKernel(np.float64, 1.0, None, 8, 16), q, k, v, dout, intervals, exact)
    assert not failures(found, q, k, v, dout, intervals, 1.0, exact)


@pytest.mark.parametrize("name, dtype", KINDS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_inputs_may_be_read_only(name, dtype, heads):
    q, k, v, dout = tensors(20, 30, *heads, 4, dtype)
    intervals = random_intervals(np.random.default_rng(0), 20, 30, "one")
    exact = plain(q, k, v, dout, intervals, 0.5, np.float64)
    for x in (q, k, v, dout):
        x.flags.writeable = False
    found = run(make_kernel(name, HOST, np.dtype(dtype), 0.5), q, k, v, dout, intervals, exact)
    assert not failures(found, q, k, v, dout, intervals, 0.5, exact)


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_queries_that_see_nothing(name):
    q, k, v, dout = tensors(6, 9, 2, 2, 4, np.float32)
    intervals = ((np.array([0, 3, 9, 0, 5, 2]), np.array([0, 3, 9, 9, 6, 2])),)
    exact = plain(q, k, v, dout, intervals, 0.5, np.float64)
    found = run(make_kernel(name, HOST, np.dtype("f4"), 0.5), q, k, v, dout, intervals, exact)
    masked = [0, 1, 2, 5]
    assert (found["out"][masked] == 0).all() and np.isneginf(found["lse"][masked]).all()
    assert (found["dq"][masked] == 0).all()
    assert not failures(found, q, k, v, dout, intervals, 0.5, exact)


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_nan_is_not_hidden(name):
    q, k, v, _ = tensors(6, 9, 1, 1, 4, np.float32)
    k[5] = np.nan
    out, lse = np.empty_like(q), np.empty((6, 1), np.float32)
    intervals = Causal().intervals(np.arange(6), np.arange(9))
    make_kernel(name, HOST, np.dtype("f4"), 0.5).forward(q, k, v, intervals, out, lse)
    assert np.isnan(out[5]).all() and np.isnan(lse[5]).all()


def test_blocks_over_parts_of_the_keys_merge_to_the_whole():
    q, k, v, dout = tensors(40, 100, 2, 1, 8, np.float64, 3.0)
    mask, kernel = Full(), NumpyKernel(np.float64, 0.35)
    parts = np.array_split(np.arange(100), 7)
    out, lse, rest = np.zeros_like(q), np.full((40, 2), -np.inf), np.zeros((40, 2))
    for part in parts:
        o, s = np.empty_like(q), np.empty((40, 2))
        kernel.forward(q, k[part], v[part], mask.intervals(np.arange(40), part), o, s)
        merge(out, lse, rest, o, s)
    intervals = mask.intervals(np.arange(40), np.arange(100))
    exact = plain(q, k, v, dout, intervals, 0.35, np.float64)
    assert distance(out, exact["out"]) < 1e-13 and distance(lse, exact["lse"]) < 1e-13


def test_polls_between_blocks():
    polls = []
    q, k, v, _ = tensors(64, 64, 1, 1, 4, np.float32)
    kernel = NumpyKernel(np.float32, 0.5, lambda: polls.append(1), block_q=16, block_k=32)
    intervals = Full().intervals(np.arange(64), np.arange(64))
    kernel.forward(q, k, v, intervals, np.empty_like(q), np.empty((64, 1), np.float32))
    assert len(polls) == 8


def test_polls_that_take_long_are_rare(monkeypatch):
    now, began = [0.0], []
    monkeypatch.setattr("a2d_mpi.comm.transport.time.perf_counter", lambda: now[0])

    class Comm:
        def Iprobe(self, *_):
            began.append(now[0])
            now[0] += takes[-1]

    takes = []
    for seconds, after in ((1e-6, 11e-6), (4e-3, 5e-3)):  # the rest is at most 1 ms
        transport, start = HostTransport(), now[0]
        takes.append(seconds), began.clear()
        for _ in range(3):
            transport.poll(Comm())
            now[0] = start + 0.99 * after
            transport.poll(Comm())
            now[0] = start = start + 1.01 * after
        assert len(began) == 3 and np.allclose(np.diff(began), 1.01 * after)


def test_blocks_are_cut_once():
    blocker, tokens = Blocker(16, 16), np.arange(8)
    masks = [IntervalMask(0 * tokens, tokens + 1).intervals(tokens, tokens) for _ in range(2)]
    first = [blocker.blocking(x, 8, 1) for x in masks]
    assert all(blocker.blocking(x, 8, 1) is y for x, y in zip(masks, first))
    assert blocker.blocking(masks[0], 8, 2).rows == 16 and first[0].rows == 8
    assert Blocker(4, 16).blocking(masks[0], 8, 1).rows == 4


@given(st.lists(st.integers(0, 6), min_size=8, max_size=8))
def test_equal_numbers_of_different_intervals(ends):
    """Blocks with equal bounds but different intervals hide different pairs."""
    blocker = Blocker(16, 16)
    for number in (1, 2):
        intervals = np.reshape(ends, (2, number, -1)).swapaxes(0, 1)
        for x in blocker.blocking(tuple(map(tuple, intervals)), 6, 1).query_blocks[0][2]:
            keys = np.arange(x.j0, x.j1)
            shown = np.any([(keys >= b[:, None]) & (keys < e[:, None]) for b, e in intervals], 0)
            assert x.hidden is None or np.array_equal(x.hidden, ~shown[x.rows][x.differ])


@pytest.mark.parametrize("mask", ["causal", "window", "two runs"])
def test_little_hidden_work_is_done(mask):
    n = 4096
    tokens = np.arange(n)
    q_tokens = np.r_[tokens[: n // 4], tokens[-n // 4 :]] if mask == "two runs" else tokens
    shown = IntervalMask(np.maximum(tokens - 1000, 0) * (mask == "window"), tokens + 1)
    intervals = shown.intervals(q_tokens, tokens)
    blocks = Blocker(BLOCK_Q, BLOCK_K).blocking(intervals, n, 1).query_blocks
    done = sum((r.stop - r.start) * (j1 - j0) for *_, found in blocks for r, j0, j1, *_ in found)
    assert 1 <= done / shown.area(q_tokens, tokens) <= 1.15


@cache
def in_blocks(dtype, parts):
    """Compute one causal problem in 16 bits, cut into parts x parts blocks.

    Results with gradients summed in float32 and in `dtype`, the exact ones, and those of one
    float32 computation.
    """
    kept, n, d = DTYPES[dtype], 512, 32
    q, k, v, dout = (x.astype(kept).astype(np.float32) for x in tensors(n, n, 2, 2, d, np.float32))
    mask, tokens, kernel = Causal(), np.arange(n), NumpyKernel(np.float32, d**-0.5)
    pieces = np.array_split(tokens, parts)
    out, lse = np.zeros_like(q), np.full((n, 2), -np.inf, np.float32)
    for rows in pieces:
        o, s = out[rows], lse[rows]
        rest = np.zeros_like(s)
        for keys in pieces:
            if keys[0] > rows[-1]:
                continue  # hidden
            partial, partial_lse = np.empty(o.shape, kept), np.empty_like(s)
            intervals = mask.intervals(rows, keys)
            kernel.forward(q[rows], k[keys], v[keys], intervals, partial, partial_lse)
            merge(o, s, rest, partial, partial_lse)
        out[rows], lse[rows] = o, s
    out = out.astype(kept).astype(np.float32)
    delta = (dout * out).sum(-1)
    sums = {"float32": np.float32, "native": kept}
    gradients = {name: [np.zeros(x.shape, t) for x in (q, k, v)] for name, t in sums.items()}
    for rows in pieces:
        for keys in pieces:
            if keys[0] > rows[-1]:
                continue
            some = [np.zeros_like(q[rows]), np.zeros_like(k[keys]), np.zeros_like(v[keys])]
            intervals = mask.intervals(rows, keys)
            of_rows = (x[rows] for x in (lse, delta))
            kernel.backward(dout[rows], q[rows], k[keys], v[keys], *of_rows, intervals, *some)
            for totals in gradients.values():
                for total, part, where in zip(totals, some, (rows, keys, keys)):
                    total[where] += part.astype(total.dtype)
    intervals = mask.intervals(tokens, tokens)
    exact = plain(q, k, v, dout, intervals, d**-0.5, np.float64)
    single = plain(q, k, v, dout, intervals, d**-0.5, np.float32)
    found = {x: {"out": out, **dict(zip(("dq", "dk", "dv"), gradients[x]))} for x in sums}
    return found, exact, single


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", [4, 16, 64])
@pytest.mark.parametrize("sums", ["float32", "native"])
def test_partials_of_low_precision(dtype, parts, sums):
    """A problem cut into parts x parts blocks keeps the error bounds.

    Partial outs may be rounded to 16 bits: a merge is a convex combination.  Gradients are sums:
    in float32 they keep the bound at any number of parts, in the dtype of the tensors they do
    not, and the error grows with the parts.
    """
    kept, (results, exact, single) = DTYPES[dtype], in_blocks(dtype, parts)
    found = results[sums]
    error = {x: distance(y.astype(kept).astype(float), exact[x]) for x, y in found.items()}
    once = {x: distance(single[x].astype(kept).astype(float), exact[x]) for x in found}
    assert error["out"] <= 2 * once["out"]
    worst = max(error[x] / once[x] for x in ("dq", "dk", "dv"))
    if sums == "float32":
        assert worst <= 2
    elif parts == 64:
        assert worst > 2


@pytest.mark.parametrize("wrong", ["one key too many", "one key too few", "scale", "float16 out"])
def test_the_bounds_can_tell(wrong):
    """Wrong results are out of bounds."""
    q, k, v, dout = tensors(300, 300, 2, 2, 32, np.float32)
    right = Causal().intervals(np.arange(300), np.arange(300))
    (begin, end), scale = right[0], 32**-0.5
    exact = plain(q, k, v, dout, right, scale, np.float64)
    shown = {"one key too many": np.minimum(end + 1, 300), "one key too few": end - 1}
    kernel = NumpyKernel(np.float32, scale * (1.001 if wrong == "scale" else 1))
    found = run(kernel, q, k, v, dout, ((begin, shown.get(wrong, end)),), exact)
    if wrong == "float16 out":
        found["out"] = found["out"].astype(np.float16)
    bad = failures(found, q, k, v, dout, right, scale, exact)
    names = {x.partition(":")[0] for x in bad}
    assert names == {"out"} if wrong == "float16 out" else names >= {"out", "lse", "dq", "dk"}


def test_unknown_kernel():
    with pytest.raises(ValueError, match="'fast'"):
        make_kernel("fast", HOST, np.dtype("float32"), 1.0)
    with pytest.raises(ValueError, match="'cupy' does not take NumPy arrays"):
        make_kernel("cupy", HOST, np.dtype("float32"), 1.0)
    with pytest.raises(ValueError, match="'cudnn' computes float16, bfloat16, got float32"):
        make_kernel("cudnn", HOST, np.dtype("float32"), 1.0)
    with pytest.raises(ValueError, match="computes float16, bfloat16, float32, got float64"):
        make_kernel("numba", HOST, np.dtype("float64"), 1.0)


@pytest.mark.parametrize("name, dtype", KINDS)
def test_padding_may_hold_anything(name, dtype):
    """NaN in masked rows and masked keys does not spread."""
    q, k, v, dout = tensors(70, 90, 2, 1, 8, dtype)
    begin, end = np.full(70, 10), 10 + np.arange(70)  # the first sees nothing
    begin[[5, 64]] = end[[5, 64]]
    intervals = ((begin, end),)
    masked, unseen = np.array([0, 5, 64]), np.r_[:10, 79:90]
    exact = plain(q, k, v, dout, intervals, 0.35, np.float64)
    kernel = make_kernel(name, HOST, np.dtype(dtype), 0.35)
    clean = run(kernel, q, k, v, dout, intervals, exact)
    for x in (q, dout):
        x[masked] = np.nan
    for x in (k, v):
        x[unseen] = np.nan
    exact["out"][masked] = np.nan
    found = run(kernel, q, k, v, dout, intervals, exact)
    for tensor in TENSORS:
        assert np.array_equal(found[tensor], clean[tensor]), tensor
    assert (found["dk"][unseen] == 0).all() and (found["dq"][masked] == 0).all()


@pytest.mark.parametrize("name", ["numpy", "numba"])
@pytest.mark.parametrize(("logit", "size"), [(-41, 1e-25), (41, -1e20)])
def test_values_of_one_head_at_the_end_of_the_range(name, logit, size):
    """Tiny or huge values of one head stay in range."""
    q, k, v, dout = tensors(20, 30, 2, 2, 4, np.float32, 0.01)
    k *= np.float32(0.01)  # or norms would be too large for the shortcut
    q[..., 0], k[..., 0] = 6.4, logit / 6.4
    v[1:, 1] = np.abs(v[1:, 1]) * np.float32(size)
    v[0, 1] = min(1, abs(size))  # the largest one is moderate where the others are huge
    intervals = random_intervals(np.random.default_rng(0), 20, 30, "full")
    exact = plain(q, k, v, dout, intervals, 1.0, np.float64)["out"]
    found, lse = np.empty_like(q), np.empty((20, 2), np.float32)
    kernel = make_kernel(name, HOST, np.dtype("f4"), 1.0)
    kernel.forward(q, k, v, intervals, found, lse)
    for head in (0, 1):
        np.testing.assert_allclose(found[:, head], exact[:, head], 1e-4, 1e-5 * abs(size) ** head)
