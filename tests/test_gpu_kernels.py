"""The kernels for GPUs against float64: on the emulated GPU always, on a real one if any."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from helpers import bounds_for, distance
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import TENSORS, dense, plain, random_intervals, tensors

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import DTYPES, compute_dtype
from a2d_mpi.core.masks import Causal
from a2d_mpi.core.shapes import runs

SHAPES = {
    "emulated": [(1, 1, 1, 1, 5), (3, 70, 4, 2, 40), (75, 34, 2, 1, 32)],
    # Each axis once, and small: one core computes the float64 results.
    "real": [(1, 1, 4, 4, 7), (1009, 517, 4, 1, 256), (1009, 1009, 4, 4, 128)]
    + [(2048, 2048, 2, 2, 64)],
}


def cudnn_kernel(cupy, plain, **options):
    """cuDNN, or what stands in for it."""
    from a2d_mpi.kernels.cudnn import CudnnKernel

    if cupy.kind == "emulated":
        from graphs import HostGraphs

        options["graphs"] = HostGraphs(options.pop("refuse", ()))
    return CudnnKernel(plain, **options)


def plain_kernel(cupy, dtype, scale):
    from a2d_mpi.devices.cuda import Cuda
    from a2d_mpi.kernels.cupy import CupyKernel

    return CupyKernel(Cuda.current(), dtype, scale)


def run(cupy, kernel, q, k, v, dout, intervals, exact, wide=True, fresh=False):
    """All results, with the statistics of `exact` (float64) for the backward pass."""
    compute = compute_dtype(q.dtype)
    dtype = compute if wide else q.dtype
    on_gpu = [cupy.asarray(x) for x in (dout, q, k, v)]
    results = [cupy.asarray(np.full(x.shape, 7, dtype)) for x in (q, q, k, v)]
    out, *gradients = results
    lse = cupy.asarray(np.full(q.shape[:2], 7, compute))
    kernel.forward(*on_gpu[1:], intervals, out, lse)
    delta = (dout.astype(np.float64) * exact["out"]).sum(-1)
    statistics = [cupy.asarray(x.astype(compute)) for x in (exact["lse"], delta)]
    kernel.backward(*on_gpu, *statistics, intervals, *gradients, fresh=fresh)
    found = dict(zip(TENSORS, map(cupy.asnumpy, (out, lse, *gradients))))
    if not fresh:
        found |= {x: found[x] - 7 for x in ("dq", "dk", "dv")}
    return found


def failures(found, q, k, v, dout, intervals, scale, exact, products=None, slack=None):
    """What is out of the bounds for `q.dtype`, results being kept in it or wider.

    `exact` are the plain ones in float64.
    """
    compute = compute_dtype(q.dtype)
    same = rounded(q, k, v, dout, intervals, scale, products)
    kept = {x: y if x == "lse" else y.astype(q.dtype) for x, y in same.items()}
    errors = {x: distance(kept[x], exact[x]) for x in kept}
    bounds = bounds_for(q.dtype, scale, (q, k, v, dout), exact, errors)
    # Results were added to 7.
    slack = 7 * float(np.finfo(compute).eps) if slack is None else slack
    found = {x: distance(y.astype(np.float64), exact[x]) for x, y in found.items()}
    return [(x, found[x], bounds[x]) for x in found if not found[x] <= bounds[x] + slack]


def rounded(q, k, v, dout, intervals, scale, products):
    """The plain computation in the compute dtype, its factors rounded to `products`."""
    visible, compute = dense(intervals, len(k)), compute_dtype(q.dtype)
    inputs = [x.astype(compute) for x in (q, k, v)]
    out, lse = reference.attention(*inputs, visible, scale, compute, products)
    out = out.astype(q.dtype).astype(compute)
    delta = (dout.astype(compute) * out).sum(-1)
    gradients = reference.attention_backward(
        dout.astype(compute), *inputs, lse, delta, visible, scale, compute, products
    )
    return dict(zip(TENSORS, (out, lse, *gradients)))


def make(shape, dtype, size=1.0, seed=0):
    return [x.astype(dtype) for x in tensors(*shape, np.float32, np.float32(size), seed)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["full", "causal", "one", "two"])
def test_plain_kernel(cupy, dtype, kind):
    bad = []
    for shape in SHAPES[cupy.kind]:
        q, k, v, dout = make(shape, DTYPES[dtype])
        scale = shape[-1] ** -0.5
        intervals = random_intervals(np.random.default_rng(1), *shape[:2], kind)
        exact = plain(q, k, v, dout, intervals, scale, np.float64)
        kernel = plain_kernel(cupy, DTYPES[dtype], scale)
        for wide, fresh in ((True, False), (False, True)):
            found = run(cupy, kernel, q, k, v, dout, intervals, exact, wide, fresh)
            wrong = failures(found, q, k, v, dout, intervals, scale, exact)
            bad += [(shape, wide, x) for x in wrong]
    assert not bad


def test_huge_logits_and_padding(cupy):
    q, k, v, dout = make((40, 50, 2, 2, 16), np.dtype(np.float32), 2500.0)
    intervals = ((np.full(40, 10), 10 + np.arange(40)),)  # the first query sees nothing
    exact = plain(q, k, v, dout, intervals, 0.25, np.float64)
    for x in (q, dout):
        x[0] = np.nan
    for x in (k, v):
        x[:10] = np.nan
    kernel = plain_kernel(cupy, q.dtype, 0.25)
    found = run(cupy, kernel, q, k, v, dout, intervals, exact, fresh=True)
    for x in (q, k, v, dout):
        x[np.isnan(x)] = 0
    assert not failures(found, q, k, v, dout, intervals, 0.25, exact)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1)])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "zigzag", "documents", "one", "two"])
@pytest.mark.parametrize("gradients", ["native", "float32"])
def test_cudnn(cupy, dtype, heads, mask, gradients):
    """Every run of a block, by cuDNN or by the plain kernel where it does not do."""
    if gradients == "float32" and heads[0] != heads[1] and cupy.kind == "real":
        gradients = "native"
    # What the plain kernel takes is slow in emulation.
    nq, nk = (70, 90) if mask in ("documents", "one", "two") else (200, 240)
    q, k, v, dout = make((nq, nk, *heads, 32), DTYPES[dtype])
    intervals, bad = shapes_of_runs(mask, nq, nk), []
    exact = plain(q, k, v, dout, intervals, 0.2, np.float64)
    kernel = cudnn_kernel(cupy, plain_kernel(cupy, q.dtype, 0.2), gradients=gradients)
    for wide, fresh in ((True, False), (False, True)):
        found = run(cupy, kernel, q, k, v, dout, intervals, exact, wide, fresh)
        bad += failures(found, q, k, v, dout, intervals, 0.2, exact, q.dtype)
        if cupy.kind == "emulated":
            launched = {block.shape for block in kernel._graphs.launched}
            shapes = {x.shape for x in runs(intervals, 64)} - {"general"}
            assert launched == shapes
            assert launched or mask in ("documents", "one", "two")
    assert not bad


def shapes_of_runs(mask, nq, nk):
    i = np.arange(nq)
    if mask == "window":
        return ((np.maximum(i - 20, 0), np.minimum(i + 41, nk)),)
    if mask == "zigzag":  # masked rows, triangle, rectangle
        return ((i * 0, np.where(i < 50, 0, np.where(i < 120, i - 20, 180))),)
    if mask == "documents":
        return ((i // 30 * 30, np.minimum(i // 30 * 30 + 30, nk)),)
    return random_intervals(np.random.default_rng(2), nq, nk, mask)


@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
def test_cudnn_without_a_kernel(cupy):
    q, k, v, dout = make((80, 90, 4, 2, 32), DTYPES["bfloat16"])
    intervals = Causal().intervals(np.arange(80), np.arange(90))
    exact = plain(q, k, v, dout, intervals, 0.2, np.float64)
    kernel = cudnn_kernel(cupy, plain_kernel(cupy, q.dtype, 0.2), refuse=("causal",))
    found = run(cupy, kernel, q, k, v, dout, intervals, exact)
    assert not failures(found, q, k, v, dout, intervals, 0.2, exact)
    assert not kernel._graphs.launched


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("parts", ["few", "some", "many"])
@pytest.mark.parametrize("gradients", ["native", "float32"])
def test_partials_of_cudnn(cupy, dtype, parts, gradients):
    """One problem in parts x parts blocks: partials rounded by cuDNN keep the bound of one."""
    from a2d_mpi.devices.cuda import Cuda

    # The emulated one is slow; test_kernels.py has 64 parts, too.
    n, parts = (
        {"emulated": 256, "real": 2048}[cupy.kind],
        {"few": 4, "some": 16, "many": 32}[parts],
    )
    device, kept, d, mask = Cuda.current(), DTYPES[dtype], 32, Causal()
    host = make((n, n, 2, 2, d), kept)
    q, k, v, dout = map(cupy.asarray, host)
    kernel = cudnn_kernel(cupy, plain_kernel(cupy, kept, d**-0.5), gradients=gradients)
    tokens = np.arange(n)
    bounds = [n * i // parts for i in range(parts + 1)]
    pieces = [slice(a, b) for a, b in zip(bounds, bounds[1:])]
    out, lse = cupy.asarray(np.zeros((n, 2, d), np.float32)), cupy.empty((n, 2), np.float32)
    final = cupy.empty((n, 2, d), kept)
    rest = cupy.asarray(np.zeros((n, 2), np.float32))
    sums = [cupy.asarray(np.zeros((n, 2, d), np.float32)) for _ in range(3)]
    for rows in pieces:
        for j, keys in enumerate(pieces):
            if keys.start >= rows.stop:
                continue  # hidden
            partial = cupy.empty(q[rows].shape, kept)
            partial_lse = cupy.empty(lse[rows].shape, np.float32)
            seen = mask.intervals(tokens[rows], tokens[keys])
            kernel.forward(q[rows], k[keys], v[keys], seen, partial, partial_lse)
            if j == 0:
                device.put(out[rows], partial)
                device.put(lse[rows], partial_lse)
            else:
                device.merge(out[rows], lse[rows], rest[rows], partial, partial_lse)
    device.put(final, out)
    delta = device.delta(dout, final)
    dq, dk, dv = sums
    for rows in pieces:
        for keys in pieces:
            if keys.start >= rows.stop:
                continue
            seen = mask.intervals(tokens[rows], tokens[keys])
            kernel.backward(
                dout[rows], q[rows], k[keys], v[keys], lse[rows], delta[rows], seen,
                dq[rows], dk[keys], dv[keys],
            )  # fmt: skip
    found = dict(zip(TENSORS, map(cupy.asnumpy, (final, lse, *sums))))
    found |= {x: found[x].astype(kept) for x in ("dq", "dk", "dv")}
    intervals = mask.intervals(tokens, tokens)
    exact = plain(*host, intervals, d**-0.5, np.float64)
    bad = failures(found, *host, intervals, d**-0.5, exact, kept, slack=0)
    assert not bad


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([1, 4, 100]))
def test_runs_paint_the_mask(nq, nk, seed, shortest):
    rng = np.random.default_rng(seed)
    steps = rng.choice([0, 1], (2, nq), p=[0.3, 0.7])
    begin = np.minimum(np.cumsum(steps[0]) - rng.integers(0, 3), nk).clip(0)
    end = np.minimum(np.cumsum(steps[1]) + rng.integers(0, 5), nk)
    if seed % 3 == 0:
        begin[rng.integers(0, nq) :] = 0
    intervals = ((begin, np.maximum(begin, end)),)
    painted, next_row = np.zeros((nq, nk), bool), 0
    for run in runs(intervals, shortest):
        assert run.rows.start == next_row < run.rows.stop
        next_row = run.rows.stop
        i = np.arange(run.rows.stop - run.rows.start)[:, None]
        j = np.arange(run.keys.stop - run.keys.start)
        diagonal = len(j) - len(i) + i
        block = painted[run.rows, run.keys]
        if run.shape == "general":
            painted[run.rows] = dense(run.intervals, nk)
        elif run.shape == "full":
            block[...] = True
        else:
            assert len(i) <= len(j)
            block |= (j <= diagonal) & ((run.shape == "causal") | (j > diagonal - run.window))
    assert next_row == nq
    assert (painted == dense(intervals, nk)).all()


def compiler_log(*options):
    """What nvcc says of kernels.cu; kept until one of the two is another, as it takes seconds."""
    source = files("a2d_mpi").joinpath("kernels", "kernels.cu")
    command = ["nvcc", "-fatbin", "-std=c++17", "-ftz=true", "-Xptxas", "-v", *options]
    command += [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (80, 90)]
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True).stdout
    key = hashlib.sha256(source.read_bytes() + version + " ".join(command).encode()).hexdigest()
    kept = Path(tempfile.gettempdir()) / f"a2d_mpi-compiled-{os.getuid()}" / f"{key[:16]}.log"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            command += [str(source), "-o", f"{folder}/k.fatbin"]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            Path(folder, "log").write_text(done.stderr)
            os.replace(f"{folder}/log", kept)
    return kept.read_text()


@pytest.mark.parametrize("element, headdim", [(0, 256), (1, 128), (2, 256), (3, 64)])
def test_kernels_compile(element, headdim):
    """For A100 and H100, within what a block may have: all in registers, also at headdim 256."""
    if shutil.which("nvcc") is None:
        pytest.skip("no GPU compiler: nvcc is not installed")
    log = compiler_log(f"-DELEMENT={element}", f"-DHEADDIM={headdim}")
    assert log.count("for 'sm_90'") == log.count("for 'sm_80'") == 17
    if element < 3:
        assert "0 bytes spill stores" in log
        assert all(x.startswith("0 ") for x in _in_memory(log))


@pytest.mark.parametrize("element", range(4))
def test_kernels_compile_as_cupy_does_it(element):
    """By NVRTC, which knows less than nvcc, with the options that CuPy 14 adds."""
    places = [Path(x) / "nvidia" for x in sys.path] + _toolkits()
    found = [x for place in places for x in place.glob("*/**/libnvrtc.so*")]
    if not found:
        pytest.skip("no GPU compiler: NVRTC is not installed")
    nvrtc, program = ctypes.CDLL(str(found[0])), ctypes.c_void_p()
    source = files("a2d_mpi").joinpath("kernels", "kernels.cu").read_bytes()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"k.cu", 0, None, None)
    options = [b"--std=c++17", b"-DELEMENT=%d" % element, b"-DHEADDIM=64", b"-arch=sm_90"]
    options += [b"-ftz=true", b"--device-as-default-execution-space"]
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    log = ctypes.create_string_buffer(1 << 20)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()


def _toolkits():
    nvcc = shutil.which("nvcc")
    return [Path(nvcc).resolve().parents[1]] if nvcc else []


def _in_memory(log):
    parts = [part.strip() for line in log.splitlines() for part in line.split(", ")]
    return [x for x in parts if "spill" in x or "stack frame" in x]


def test_kernels_do_not_depend_on_the_order_of_threads(monkeypatch):
    """The emulation runs threads one by one; in the other order, a missing barrier would tell."""
    results, here = [], Path(__file__).parent
    code = f"""
import sys

sys.path[:0] = [{str(here)!r}, {str(here / "emulated")!r}]
import cupy
import numpy as np
import test_gpu_kernels as t

cupy.kind = "emulated"
q, k, v, dout = t.make((37, 45, 2, 1, 40), np.dtype(np.float32))
seen = t.random_intervals(np.random.default_rng(1), 37, 45, "two")
exact = t.plain(q, k, v, dout, seen, 0.2, np.float64)
found = t.run(cupy, t.plain_kernel(cupy, q.dtype, 0.2), q, k, v, dout, seen, exact)
print(b"".join(x.tobytes() for x in found.values()).hex())
"""
    for order in ("forwards", "backwards"):
        monkeypatch.setenv("EMULATED_GPU_ORDER", order)
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100
        )
        results.append(done.stdout)
    assert results[0] == results[1] and len(results[0]) > 1000
