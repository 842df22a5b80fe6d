"""The passes of the NumPy kernel, by NumPy and compiled, against float64."""

import sys

import numpy as np
import pytest

from a2d_mpi.devices.host import HOST
from a2d_mpi.kernels import make_kernel
from a2d_mpi.kernels.compiled import NumbaKernel
from a2d_mpi.kernels.numpy import NumpyKernel

PASSES = {
    "numpy": NumpyKernel(np.dtype("f4"), 1.0),
    "numba": NumbaKernel(np.dtype("f4"), 1.0),
    "float64": NumpyKernel(np.dtype("f8"), 1.0),
}
every = pytest.mark.parametrize("name", list(PASSES))


def dtype_of(name):
    return np.float64 if name == "float64" else np.float32


@every
@pytest.mark.parametrize("low, high, bound", [(-87, 80, 3.5e-7), (-10, 10, 2.2e-7)])
def test_exponentials(name, low, high, bound):
    x = np.linspace(low, high, 3 * 1001 * 331, dtype=dtype_of(name)).reshape(3, 1001, 331)
    exact, total = np.exp(x.astype(np.float64)), np.ones((3, 1001), x.dtype)
    PASSES[name].exponentials(x, total, None, None)
    assert np.abs(x / exact - 1).max() < (1e-14 if name == "float64" else bound)
    assert np.abs(total / (1 + exact.sum(-1)) - 1).max() < 1e-5
    again = np.log(exact).astype(x.dtype)
    PASSES[name].exponentials(again, None, None, None)  # no sums
    assert np.abs(again / exact - 1).max() < 1e-5


@every
def test_exponentials_of_anything(name):
    """Infinite, huge, tiny and NaN logits are right at all places of a vector."""
    given = [-np.inf, -1e30, -104, -50, -0.0, 0, 1e-30, 50, np.nan, np.nan, -np.inf]
    large = [np.inf, 1e30, 89] if name != "float64" else [np.inf, 1e30, 710]
    x = np.array([given + large, large + given, given[::-1] + large], dtype_of(name))[None]
    with np.errstate(over="ignore"):
        exact = np.exp(x)
        PASSES[name].exponentials(x, None, None, None)
    assert np.allclose(x, exact, rtol=1e-6, atol=1e-38, equal_nan=True)
    assert (x[np.isneginf(exact)] == 0).all() and np.isnan(x).sum() == 6


@every
def test_bits_do_not_depend_on_where_arrays_lie(name):
    """Results do not depend on the addresses of arrays."""
    rng, kind, found = np.random.default_rng(0), dtype_of(name), set()
    scores, hide = rng.standard_normal((1, 40, 33)).astype(kind), rng.random((30, 33)) < 0.5
    memory = np.zeros(1 << 16, np.uint8)
    at = 1 << 15
    s = memory[at : at + scores.nbytes].view(kind).reshape(scores.shape)
    before = range(at - hide.size - 256, at - hide.size, 4)
    after = range(at + scores.nbytes, at + scores.nbytes + 256, 4)
    for start in (*before, *after):
        hidden = memory[start : start + hide.size].view(bool).reshape(hide.shape)
        s[...], hidden[...], total = scores, hide, np.zeros((1, 40), kind)
        PASSES[name].exponentials(s, total, slice(3, 33), hidden)
        found.add(s.tobytes() + total.tobytes())
    assert len(found) == 1


@every
def test_largest_norms(name):
    rng, kind = np.random.default_rng(0), dtype_of(name)
    q, k, v = (rng.standard_normal((n, h, 19)).astype(kind) for n, h in ((31, 4), (7, 2), (7, 2)))
    v[:, 1] *= 1e-3
    squares = [(x.astype(np.float64) ** 2).sum(-1) for x in (q, k, v)]
    exact = squares[0].max(), squares[1].max(), squares[2][:, 1].max(), squares[2][:, 0].max()
    assert np.allclose(PASSES[name].largest_norms(q, k, v, None, None), exact, rtol=1e-5)
    # What is hidden may be anything.
    q, k, v = (np.concatenate([x, np.full_like(x[:1], np.nan)]) for x in (q, k, v))
    hide = np.arange(len(q)) == len(q) - 1, np.arange(len(k)) == len(k) - 1
    assert np.allclose(PASSES[name].largest_norms(q, k, v, *hide), exact, rtol=1e-5)


@pytest.mark.parametrize("why", ["missing", "switched off", "nowhere to keep"])
def test_without_numba(why, monkeypatch):
    """ "auto" works without Numba, and "numba" says what is missing."""
    monkeypatch.delitem(sys.modules, "a2d_mpi.kernels.compiled")
    if why == "missing":
        monkeypatch.setitem(sys.modules, "numba", None)
    elif why == "switched off":
        monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    else:
        from numba.core import caching

        def refuse(*_):
            raise RuntimeError("cannot cache function: no locator available")

        monkeypatch.setattr(caching.FunctionCache, "__init__", refuse)
        assert make_kernel("numba", HOST, np.dtype("f4"), 1.0).name == "numba"
        return
    assert make_kernel("auto", HOST, np.dtype("f4"), 1.0).name == "numpy"
    with pytest.raises(ImportError, match="kernel 'numba' needs pip install a2d_mpi\\[numba\\]"):
        make_kernel("numba", HOST, np.dtype("f4"), 1.0)


def test_names():
    kinds = {"float32": "numba", "float16": "numba", "float64": "numpy"}
    for dtype, name in kinds.items():
        assert make_kernel("auto", HOST, np.dtype(dtype), 1.0).name == name
        assert make_kernel("numpy", HOST, np.dtype(dtype), 1.0).name == "numpy"
