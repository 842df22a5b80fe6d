"""The NumPy kernel against the float64 reference."""

import numpy as np
import pytest
from blocks import BFLOAT16, Block, assert_kernel, in_parts, random_intervals
from helpers import deeper, distance
from hypothesis import given, settings
from hypothesis import strategies as st

from a2d_mpi import Full, IntervalMask
from a2d_mpi.comm.transport import Transport
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.devices.host import HOST
from a2d_mpi.kernels import make_kernel
from a2d_mpi.kernels.blocks import Blocker
from a2d_mpi.kernels.numpy import BLOCK_K, BLOCK_Q, NumpyKernel
from a2d_mpi.masks.intervals import Intervals

KERNELS = [("numpy", "float32"), ("numba", "float32"), ("numpy", "float64"), ("numba", "bfloat16")]
KERNELS += [(BFLOAT16, "bfloat16")]
KINDS, SHAPES = ("full", "causal", "one", "two"), [(1, 1), (3, 700), (600, 5), (310, 1100)]
# Heads, KV heads, headdim, perhaps another headdim of v; size of q, so logits to 10, 500, 3e4;
# soft-caps below and above the largest logit whose exponential needs no shift.
PLAIN = [
    ((4, 1, 32), 40.0, None), ((3, 3, 24, 16), 1.0, None), ((2, 2, 8), 1.0, 1.5),
    ((4, 2, 8), 400.0, 500.0),
]  # fmt: skip
DEEP = [
    ((2, 2, 7), 1.0, None), ((2, 2, 7), 2500.0, None), ((4, 1, 32), 2500.0, None),
    ((4, 2, 8), 40.0, 30.0), ((4, 2, 8), 1.0, 500.0), ((6, 1, 576, 512), 1.0, None),
    ((3, 3, 16, 40), 40.0, None), ((3, 3, 192, 128), 1.0, None),
]  # fmt: skip


@pytest.mark.parametrize("kernel", range(5), ids=lambda i: "-".join(KERNELS[i]))
@pytest.mark.parametrize("kind", range(4), ids=KINDS.__getitem__)
@pytest.mark.parametrize("case", deeper(PLAIN + DEEP, PLAIN), ids=str)
def test_kernel(kernel, kind, case):
    """Each kernel and mask has one shape with a case, and each shape with one case in four."""
    shape = SHAPES[(kernel + kind + (PLAIN + DEEP).index(case)) % 4]
    assert_kernel(*KERNELS[kernel], KINDS[kind], case, shape)


@settings(max_examples=60)
@given(
    st.integers(0, 40), st.integers(0, 60), st.integers(1, 3), st.integers(1, 3),
    st.sampled_from(["full", "causal", "one", "two"]), st.sampled_from([0.1, 30.0]),
    st.sampled_from([None, 5.0]), st.integers(1, 20), st.integers(1, 40), st.integers(0, 99),
)  # fmt: skip
def test_any_blocks(nq, nk, group, nheads_kv, kind, size, cap, block_q, block_k, seed):
    """One kernel object serves all shapes."""
    kernel = NumpyKernel(np.float64, 0.5, logit_softcap=cap)
    kernel._blocker = Blocker(block_q, block_k)
    for shape in ((nq, nk), (nk, nq)):
        sizes = (*shape, group * nheads_kv, nheads_kv, 4)
        intervals = random_intervals(*shape, kind, seed)
        block = Block(sizes, "float64", intervals, 0.5, cap, size, seed)
        assert not block.wrong(block.run(kernel))


def of_rows(q, k, size):
    q[..., 0], k[..., 0] = 100, size / 100


def rising(q, k):
    q[..., 0], k[..., 0] = 1, np.linspace(-400, 400, len(k))[:, None]


@pytest.mark.parametrize("kind, change", [
    ("causal", lambda q, k, *_: of_rows(q, k, -9e3)),
    ("causal", lambda q, k, *_: of_rows(q, k, 9e3)),
    ("full", lambda q, k, *_: rising(q, k)),
])  # fmt: skip
def test_rows_far_from_zero(kind, change):
    """Without a shift they are lost or overflow; the shift rises with every block of keys."""
    block = Block((50, 200, 1, 1, 4), "float64", kind, 1.0, size=0.1, change=change)
    kernel = NumpyKernel(np.float64, 1.0)
    kernel._blocker = Blocker(8, 16)
    found = block.run(kernel)
    assert not block.wrong(found) and np.isfinite(found["lse"]).all()


@pytest.mark.parametrize("name", ["numpy", "numba"])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("careful", [False, True])
def test_nan_is_not_hidden(name, cap, careful):
    """A NaN in a key that some queries see; a careful kernel keeps it from all others."""
    block = Block((30, 40, 1, 1, 8), "float32", "causal", 0.3, cap)
    q, k, v, dout = (x.copy() for x in block.inputs)
    k[20], v[20] = np.nan, np.nan
    kernel = make_kernel(name, HOST, np.dtype("f4"), 0.3, logit_softcap=cap)
    assert kernel._bounded(*block.inputs[:3], None, None)
    found = block.run(kernel, (q, k, v, dout), careful=careful)
    assert np.isnan(found["out"][20:]).all() and np.isnan(found["lse"][20:]).all()
    for x in ("out", "lse", "dq"):
        assert not careful or distance(found[x][:20], block.exact[x][:20]) < 1e-5, x


def test_polls_between_blocks():
    polls, (q, k, v, _) = [], np.ones((4, 64, 1, 4), np.float32)
    kernel = NumpyKernel(np.float32, 0.5, lambda: polls.append(1))
    kernel._blocker = Blocker(16, 32)
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
        transport, start = Transport(), now[0]
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
        for x in blocker.blocking(Intervals(intervals), 6, 1).query_blocks[0][2]:
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", [4, 16])
def test_partials_of_low_precision(dtype, parts):
    """A problem cut into parts x parts blocks keeps the error bounds of one block.

    Partial outs may be rounded to 16 bits: a merge is a convex combination.  Gradients are sums:
    in float32 they keep the bound at any number of parts, in the dtype of the tensors they do
    not, and the error grows with the parts.
    """
    block = Block((512, 512, 2, 2, 32), dtype, "causal")
    kernel = make_kernel("numpy", HOST, block.dtype, block.scale)
    assert not block.wrong(in_parts(block, parts, kernel, HOST))
    native = block.wrong(in_parts(block, parts, kernel, HOST, block.dtype))
    assert parts < 16 or {x[:2] for x in native} & {"dq", "dk", "dv"}


@pytest.mark.parametrize(
    "name, dtype, text",
    [
        ("fast", "float32", "'fast'"),
        ("cupy", "float32", "'cupy' does not take NumPy arrays"),
        ("cudnn", "float32", "'cudnn' computes float16, bfloat16, got float32"),
        ("numba", "float64", "computes float16, bfloat16, float32, got float64"),
    ],
)
def test_refused(name, dtype, text):
    with pytest.raises(ValueError, match=text):
        make_kernel(name, HOST, DTYPES[dtype], 1.0)


@pytest.mark.parametrize("name", ["numpy", "numba"])
@pytest.mark.parametrize(("logit", "size"), [(-41, 1e-25), (41, -1e20)])
def test_values_of_one_head_at_the_end_of_the_range(name, logit, size):
    """Tiny or huge values of one head stay in range."""

    def change(q, k, v, dout):
        k *= 0.01  # or norms would be too large for the shortcut
        q[..., 0], k[..., 0] = 6.4, logit / 6.4
        v[1:, 1] = np.abs(v[1:, 1]) * size
        v[0, 1] = min(1, abs(size))  # the largest one is moderate where the others are huge

    block = Block((20, 30, 2, 2, 4), "float32", "full", 1.0, size=0.01, change=change)
    found, lse = np.empty_like(block.inputs[0]), np.empty((20, 2), np.float32)
    kernel = make_kernel(name, HOST, np.dtype("f4"), 1.0)
    kernel.forward(*block.inputs[:3], block.intervals, found, lse)
    for head in (0, 1):
        exact = block.exact["out"][:, head]
        np.testing.assert_allclose(found[:, head], exact, 1e-4, 1e-5 * abs(size) ** head)
