"""Logit soft-cap and attention sink: kernels and plans against float64."""

import numpy as np
import pytest
from dense import bounds, out_of_bounds, plain
from helpers import SAMPLE, assert_all_refused, distance, drive
from test_kernels import dense, random_intervals, run, tensors

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.results import read_result
from a2d_mpi.kernels import make_kernel
from a2d_mpi.kernels.numpy import NumpyKernel


def test_sink_is_a_key_without_a_value():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, 1, 3)) for _ in range(3))
    q[..., 0], k[0], v[0] = 1, (0.4, 0, 0), 0  # the first key has the same logit for all queries
    whole = reference.attention(q, k, v, np.ones((4, 4), bool), 1.0)
    rest = reference.attention(q, k[1:], v[1:], np.ones((4, 3), bool), 1.0, sink=np.array([0.4]))
    assert all(np.allclose(x, y, atol=1e-14) for x, y in zip(whole, rest))


# Caps below and above the largest logit whose exponential needs no shift.
@pytest.mark.parametrize("cap, size", [(1.5, 1.0), (30.0, 40.0), (500.0, 1.0), (500.0, 2500.0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["full", "causal", "two"])
def test_numpy_kernel(cap, size, dtype, kind):
    inputs = tensors(60, 90, 4, 2, 8, dtype, size)
    intervals = random_intervals(np.random.default_rng(1), 60, 90, kind)
    visible, scale = dense(intervals, 90), 8**-0.5
    exact = plain(inputs, visible, scale, cap)
    largest = bounds(inputs, visible, scale, cap, None, exact, np.dtype(dtype))
    for options in ({}, {"block_q": 16, "block_k": 16}):
        kernel = NumpyKernel(dtype, scale, logit_softcap=cap, **options)
        found = run(kernel, *inputs, intervals, exact)
        assert not out_of_bounds(found, exact, largest)
    general = NumpyKernel(dtype, scale, logit_softcap=cap, block_q=16, block_k=16)
    general._bounded = lambda *_: False
    assert not out_of_bounds(run(general, *inputs, intervals, exact), exact, largest)


@pytest.mark.parametrize("wrong", ["no cap", "another cap", "after the scale of k", "no slope"])
def test_wrong_caps_are_found(wrong, monkeypatch):
    inputs = tensors(40, 50, 2, 2, 8, np.float32)
    intervals = random_intervals(np.random.default_rng(1), 40, 50, "causal")
    visible, scale, cap = dense(intervals, 50), 8**-0.5, 2.0
    exact = plain(inputs, visible, scale, cap)
    largest = bounds(inputs, visible, scale, cap, None, exact, np.dtype(np.float32))
    caps = {"no cap": None, "another cap": cap * 1.001, "after the scale of k": cap / scale}
    kernel = NumpyKernel(np.float32, scale, logit_softcap=caps.get(wrong, cap))
    if wrong == "no slope":
        right = kernel._cap

        def no_slope(s, slope=None):
            right(s, slope)
            if slope is not None:
                slope[:] = 1

        monkeypatch.setattr(kernel, "_cap", no_slope)
    found = run(kernel, *inputs, intervals, exact)
    bad = {x.split(":")[0] for x in out_of_bounds(found, exact, largest)}
    assert bad >= ({"dq", "dk"} if wrong == "no slope" else {"out", "lse", "dq", "dk"})


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_careful_kernel_with_a_cap(name):
    """NaN in a hidden key stays with the queries that see it."""
    q, k, v, dout = tensors(30, 40, 1, 1, 8, np.float32)
    intervals = ((np.zeros(30, int), np.arange(30) + 1),)
    visible = dense(intervals, 40)
    exact = plain((q, k, v, dout), visible, 0.3, 2.0)
    k[20], v[20] = np.nan, np.nan
    kernel = make_kernel(name, HOST, np.dtype("f4"), 0.3, logit_softcap=2.0)
    found = run(kernel, q, k, v, dout, intervals, exact, careful=True)
    assert np.isnan(found["out"][20:]).all()
    for name in ("out", "lse", "dq"):
        assert distance(found[name][:20], exact[name][:20]) < 1e-5, name


def test_kernels_without_a_cap():
    for kernel in ("cudnn", "cudnn-deterministic"):
        with pytest.raises(ValueError, match=f"'{kernel}' computes no soft-cap, got .* 30.0"):
            make_kernel(kernel, HOST, DTYPES["bfloat16"], 1.0, logit_softcap=30.0)
    assert make_kernel("auto", HOST, DTYPES["bfloat16"], 1.0, logit_softcap=30.0).logit_softcap


SINKS = [-np.inf, -50.0, 0.3, 4000.0]


def statistics(dtype):
    """Return out, lse and delta for ordinary, huge and masked rows with a sink."""
    rng = np.random.default_rng(0)
    lse = np.repeat(np.array([-np.inf, -3e3, 0.1, 4001.5, 9e4])[:, None], 4, 1)
    out = rng.standard_normal((5, 4, 6)) * (lse > -np.inf)[..., None]
    delta = rng.standard_normal((5, 4)) * (lse > -np.inf)
    return [x.astype(dtype) for x in (out, lse, delta, np.array(SINKS))]


def assert_sinks(out, lse, gradient, delta, given):
    """Assert that the device's results for sinks equal their formulas."""
    old_out, old_lse, sink = (x.astype(float) for x in given)
    exact = np.logaddexp(old_lse, sink)
    with np.errstate(over="ignore", invalid="ignore"):
        weight = np.nan_to_num(1 / (1 + np.exp(sink - old_lse)))  # inf - inf: NaN
    eps = np.finfo(lse.dtype).eps
    assert distance(lse, exact) <= eps * 9e4
    assert distance(out, old_out * weight[..., None]) <= 4 * eps * np.abs(old_out).max()
    shown = lse.astype(float)
    p = np.exp(sink - np.where(np.isneginf(shown), np.inf, shown))
    assert distance(gradient, -(p * delta).sum(0)) <= 20 * eps
    assert np.isfinite(gradient).all() and np.isneginf(lse[0, 0]) and lse[0, 2] == sink[2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sinks_of_the_host(dtype):
    out, lse, delta, sink = statistics(dtype)
    given = out.copy(), lse.copy(), sink
    HOST.add_sink(out, lse, sink)
    assert_sinks(out, lse, HOST.sink_gradient(lse, delta, sink), delta, given)
    assert HOST.sink_gradient(lse[:0], delta[:0], sink).tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sinks_of_a_gpu(cupy, dtype):
    from a2d_mpi.devices.cuda import Cuda

    out, lse, delta, sink = statistics(dtype)
    x, y, z, s = map(cupy.asarray, (out, lse, delta, sink))
    Cuda.current().add_sink(x, y, s)
    gradient = Cuda.current().sink_gradient(y, z, s)
    found = map(cupy.asnumpy, (x, y, gradient))
    assert_sinks(*found, delta, (out, lse, sink))
    none = Cuda.current().sink_gradient(y[:0], z[:0], s)
    assert cupy.asnumpy(none).tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["causal", "two"])
def test_plain_gpu_kernel(cupy, dtype, kind):
    import test_gpu_kernels as gpu

    shape = (40, 70, 4, 2, 40) if cupy.kind == "emulated" else (509, 1009, 4, 2, 128)
    q, k, v, dout = gpu.make(shape, DTYPES[dtype], 3.0)
    intervals = random_intervals(np.random.default_rng(1), *shape[:2], kind)
    visible, scale, cap = dense(intervals, shape[1]), shape[-1] ** -0.5, 5.0
    exact = plain((q, k, v, dout), visible, scale, cap)
    largest = bounds((q, k, v, dout), visible, scale, cap, None, exact, q.dtype)
    kernel = gpu.plain_kernel(cupy, DTYPES[dtype], scale)
    for right in (False, True):
        kernel.logit_softcap = cap if right else None
        found = gpu.run(cupy, kernel, q, k, v, dout, intervals, exact, wide=False, fresh=True)
        assert bool(out_of_bounds(found, exact, largest)) != right


@pytest.mark.parametrize(
    "options", [["--softcap", 5, "--sink"], ["--sink", "--dtype", "bfloat16"]]
)
def test_driver(tmp_path, options):
    output = tmp_path / "run.h5"
    common = ["--seqlen", 60, "--backward", "--check", "full", "--trials", 1, "--output", output]
    drive("attention.py", 2, SAMPLE, *common, *options)
    result = read_result(output)
    assert result.passed and {"dsink", "repeat"} <= {*result.checks}
    assert result.config["sink"] and result.config["logit_softcap"] == 5 * ("--softcap" in options)


def test_driver_refuses():
    text = "--softcap must be at least 1e-30, got -5.0"
    assert_all_refused("attention.py", 2, [([SAMPLE, "--softcap", -5], [], text)])
