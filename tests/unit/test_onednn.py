"""The kernel "onednn": its library, its rows, and what it does where it cannot compute.

The tests of all kernels compare it with float64, on CPUs that have products of bfloat16.
"""

import ctypes
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from blocks import BFLOAT16, Block, random_intervals
from helpers import distance
from numba import njit

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.devices.host import HOST
from a2d_mpi.kernels import make_kernel, onednn, onednn_calls
from a2d_mpi.masks.intervals import Intervals

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
    for dtype in ("float32", "float64"):
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
            acc = np.zeros((30, 8), "f4")
            onednn._weights(s, 90, 1.0, 3, hidden, shift, total, acc, p)
        else:
            total = np.zeros_like(p)
            given = s, scores[1], 32, 1.0, 0.0, 0, NOTHING, shift, shift
            onednn._gradients(*given, p, total)
        found.add(p.tobytes() + total.tobytes() + shift.tobytes())
    assert len(found) == 1


def test_sums_of_exponentials():
    """The error is that of float32 before rounding; both sums are right."""
    x = np.linspace(-87, 9, 3 << 16, dtype=np.float32)
    p, exact = np.empty(len(x), np.uint16), np.exp(x.astype(float))
    top, total, rounded = onednn._powers(x, np.float32(1), np.float32(0), p)
    found = p.view(KIND).astype(float)
    near = exact > 1e-7
    assert (
        top == 9 and abs(total / exact.sum() - 1) < 1e-5 and abs(rounded / found.sum() - 1) < 1e-5
    )
    step = np.maximum(exact * 2.0**-8, 2.0**-133)
    assert (np.abs(found - exact) <= step * 1.01)[near].all()


def test_rounding():
    """Bits of all sizes and signs, of subnormal and infinite numbers, and of NaN."""
    x = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    more = 0, -0.0, 65519, 1e-7, -3e-8, np.inf, -np.inf, np.nan
    x = np.append(x, np.array(more, np.float32))
    to = np.empty(x.shape, np.uint16)
    round_all(x, to)
    with np.errstate(all="ignore"):
        expected, found = (y.astype(float) for y in (x.astype(KIND), to.view(KIND)))
        right = np.abs(found - x) <= 1.001 * np.abs(expected - x)  # ties may go either way
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    assert (same | right).all()


@njit
def round_all(x, to):
    for i in range(len(x)):
        to[i] = onednn._rounded(x[i])


class NumPyProduct:
    """In place of oneDNN's product."""

    def __init__(self, equation, sizes):
        self.out, self.sign, *self.factors = equation.split()
        self.sizes = sizes

    def __call__(self, a, b, out):
        x = self.matrix(self.factors[0], a, np.uint16).view(KIND).astype(np.float32)
        y = self.matrix(self.factors[1], b, np.uint16).view(KIND).astype(np.float32)
        to = self.matrix(self.out, out, np.float32)
        result = np.einsum(f"{','.join(self.factors)}->{self.out}", x, y)
        to[:] = result + (to if self.sign == "+=" else 0)

    def matrix(self, axes, at, kind):
        shape = [self.sizes[x] for x in axes]
        size = math.prod(shape) * np.dtype(kind).itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(at), kind).reshape(shape)


@pytest.fixture(params=["oneDNN", "NumPy"])
def dtype(request, monkeypatch):
    """The kernel's dtype, with oneDNN's products, or with NumPy's, which every CPU has."""
    if request.param == "NumPy":
        monkeypatch.setattr(onednn, "Product", NumPyProduct)
        monkeypatch.setattr(onednn, "check_products", lambda: None)
    elif not HERE:
        pytest.skip("no products of bfloat16")
    return KIND.name


def test_small_blocks(dtype):
    """Another kernel computes them: no product is made."""
    kernel = make_kernel("onednn", HOST, DTYPES[dtype], 0.3)
    for tokens, made in ((128, 0), (256, 2)):
        q, k, v = np.ones((3, tokens, 2, 64), DTYPES[dtype])
        seen = Intervals(random_intervals(tokens, tokens, "full"))
        out, lse = np.empty(q.shape, np.float32), np.empty((tokens, 2), np.float32)
        kernel.forward(q, k, v, seen, out, lse)
        assert np.allclose(out, 1) and sum(map(len, kernel._made.values())) == made


def test_few_shapes_of_products(dtype):
    """Blocks of any size need few products, because each one takes as long as a small block."""
    kernel = make_kernel("onednn", HOST, DTYPES[dtype], 0.3)
    for n in range(40, 140, 7):
        for kind in ("causal", "one", "two"):
            block = Block((n, n + 3, 2, 1, 8), dtype, kind, 0.3)
            block.run(kernel)
    assert len(kernel._made) <= 2 * 7 * 9


@pytest.mark.parametrize("cap", [None, 20.0])
def test_what_a_call_returns(cap, dtype):
    """Polls, equal bits, and NaN that stays where it belongs."""
    block, polls = Block((70, 600, 4, 2, 16), dtype, "causal", 0.3, cap, size=20), []
    kind = DTYPES[dtype]
    kernel = make_kernel("onednn", HOST, kind, 0.3, lambda: polls.append(1), logit_softcap=cap)
    first, again = block.run(kernel), block.run(kernel)
    assert all(np.array_equal(x, again[y]) for y, x in first.items()) and len(polls) > 8
    q, k, v, _ = block.inputs
    k, v = k.copy(), v.copy()
    k[20:22], v[20:22] = np.nan, np.nan
    found = block.run(kernel, (q, k, v, block.inputs[3]), careful=True)
    assert np.isnan(found["out"][22:]).all()
    for x in ("out", "lse", "dq"):
        assert distance(found[x][:20], block.exact[x][:20]) < 0.1, x


def test_logits_that_rise_from_block_to_block(dtype):
    """The shift of a row rises, and what was summed before shrinks."""

    def change(q, k, v, dout):
        q[..., 0], k[..., 0] = 1, np.linspace(-400, 400, len(k))[:, None]

    block = Block((64, 1500, 1, 1, 8), dtype, "full", 1.0, size=0.1, change=change)
    block.products = DTYPES[dtype]
    kernel = make_kernel("onednn", HOST, block.products, 1.0)
    assert not block.wrong(block.run(kernel))
