"""The kernel "onednn": its library, its rows, and what it does where it cannot compute.

The tests of all kernels compare it with float64, on CPUs that have products of bfloat16.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from blocks import BFLOAT16, Block
from helpers import distance

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.devices.host import HOST
from a2d_mpi.kernels import make_kernel, onednn, onednn_calls

KIND = DTYPES["bfloat16"]
HERE = BFLOAT16 == "onednn"
NOTHING = np.zeros((0, 0), bool)


@pytest.fixture(autouse=True)
def _found_anew():
    onednn_calls.open_library.cache_clear()
    yield
    onednn_calls.open_library.cache_clear()


def python(code, **env):
    """Run Python in a process that begins with another environment."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_a_lower_instruction_set_has_no_products():
    """ "auto" takes another kernel, and "onednn" says why it cannot compute."""
    code = """if True:
        import numpy as np, ml_dtypes
        from a2d_mpi.devices.host import HOST
        from a2d_mpi.kernels import make_kernel
        given = HOST, np.dtype(ml_dtypes.bfloat16), 1.0
        print(make_kernel("auto", *given).name)
        try:
            make_kernel("onednn", *given)
        except ValueError as error:
            print(error)
    """
    name, *refusal = python(code, ONEDNN_MAX_CPU_ISA="AVX512_CORE")
    assert name == "numba"
    assert "has no bfloat16 products for this CPU" in " ".join(refusal)
    assert "ONEDNN_MAX_CPU_ISA" in " ".join(refusal)


def test_a_file_that_is_no_library(monkeypatch, tmp_path):
    """The user's file is tried, and no other; so "auto" takes another kernel."""
    (tmp_path / "libdnnl.so.3").write_bytes(b"no library")
    monkeypatch.setenv("A2D_MPI_ONEDNN", str(tmp_path / "libdnnl.so.3"))
    with pytest.raises(ImportError, match=r"pip install a2d_mpi\[onednn\].*A2D_MPI_ONEDNN=FILE"):
        make_kernel("onednn", HOST, KIND, 1.0)
    assert make_kernel("auto", HOST, KIND, 1.0).name == "numba"


def test_other_dtypes_do_not_look_for_the_library(monkeypatch):
    monkeypatch.setattr(onednn_calls, "_places", lambda: pytest.fail("searched"))
    for dtype in ("float32", "float16", "float64"):
        assert make_kernel("auto", HOST, DTYPES[dtype], 1.0).name in ("numba", "numpy")


@pytest.mark.parametrize("name", ["_weights", "_gradients"])
def test_bits_do_not_depend_on_where_arrays_lie(name):
    """LLVM may sum in another order if arrays seem to overlap."""
    rng, found = np.random.default_rng(0), set()
    scores, memory = rng.standard_normal((2, 32, 96)).astype(np.float32), np.zeros(1 << 17, "u1")
    at, hidden = 1 << 16, rng.random((20, 90)) < 0.3
    for gap in (*range(0, 300, 4), 4096):
        s = memory[at : at + scores[0].nbytes].view("f4").reshape(32, 96)
        start = at + s.nbytes + gap if gap % 8 else at - s.nbytes // 2 - gap
        p = memory[start : start + s.nbytes // 2].view(np.uint16).reshape(32, 96)
        s[:] = scores[0]
        shift, total = np.zeros(30, "f4"), np.zeros((2, 30), "f4")
        if name == "_weights":
            onednn._weights(s, 90, 1.0, 3, hidden, shift, total, np.zeros((30, 8), "f4"), p)
        else:
            total = np.zeros_like(p)
            onednn._gradients(s, scores[1], 32, 1.0, 0.0, 0, NOTHING, shift, shift, p, total)
        found.add(p.tobytes() + total.tobytes() + shift.tobytes())
    assert len(found) == 1


def test_powers_of_two():
    """The error is that of float32 before rounding, and powers that are too small are 0."""
    x = np.linspace(-125, 14, 3 << 16, dtype=np.float32)
    p = np.empty(len(x), np.uint16)
    exact = np.exp2(x.astype(float))
    top, total, rounded = onednn._powers(x, np.float32(1), np.float32(0), p)
    assert top == 14 and abs(total / exact.sum() - 1) < 1e-5
    found = (p.astype(np.uint32) << 16).view(np.float32)
    assert np.abs(found / exact - 1).max() < 2**-8 * 1.01
    assert abs(rounded / found.astype(float).sum() - 1) < 1e-5
    for y in (-127, -1e30, -np.inf):
        assert onednn._exp2(np.float32(y)) == 0
    assert np.isnan(onednn._exp2(np.float32(np.nan)))


needs_products = pytest.mark.skipif(not HERE, reason="no products of bfloat16")


@needs_products
def test_few_shapes_of_products():
    """Blocks of any size need few products, because each one takes as long as a small block."""
    kernel = make_kernel("onednn", HOST, KIND, 0.3)
    for n in range(40, 140, 7):
        for kind in ("causal", "one", "two"):
            block = Block((n, n + 3, 2, 1, 8), "bfloat16", kind, 0.3)
            block.run(kernel)
    assert len(kernel._products) <= 7 * 9 * 5


@needs_products
@pytest.mark.parametrize("cap", [None, 20.0])
def test_what_a_call_returns(cap):
    """Largest logits, polls, equal bits, and NaN that stays where it belongs."""
    block, polls = Block((70, 600, 4, 2, 16), "bfloat16", "causal", 0.3, cap, size=20), []
    kernel = make_kernel("onednn", HOST, KIND, 0.3, lambda: polls.append(1), logit_softcap=cap)
    first, again = block.run(kernel), block.run(kernel)
    assert all(np.array_equal(x, again[y]) for y, x in first.items()) and len(polls) > 8
    q, k, v, _ = block.inputs
    largest, lse = np.full(4, -np.inf, np.float32), np.empty((70, 4), np.float32)
    out = np.empty(q.shape, np.float32)
    kernel.forward(q, k, v, block.intervals, out, lse, largest=largest)
    s = 0.3 * np.einsum("qhd,khd->hqk", q.astype(float), np.repeat(k, 2, 1).astype(float))
    expected = np.where(block.visible, s, -np.inf).max((1, 2))
    assert np.allclose(largest, expected, rtol=1e-5)
    k, v = k.copy(), v.copy()
    k[20:22], v[20:22] = np.nan, np.nan
    found = block.run(kernel, (q, k, v, block.inputs[3]), careful=True)
    assert np.isnan(found["out"][22:]).all()
    for x in ("out", "lse", "dq"):
        assert distance(found[x][:20], block.exact[x][:20]) < 0.1, x


@needs_products
def test_logits_that_rise_from_block_to_block():
    """The shift of a row rises, and what was summed before shrinks."""

    def change(q, k, v, dout):
        q[..., 0], k[..., 0] = 1, np.linspace(-400, 400, len(k))[:, None]

    block = Block((64, 1500, 1, 1, 8), "bfloat16", "full", 1.0, size=0.1, change=change)
    block.products = KIND
    kernel = make_kernel("onednn", HOST, KIND, 1.0)
    assert not block.wrong(block.run(kernel))
