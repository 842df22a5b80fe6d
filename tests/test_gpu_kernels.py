"""The kernels for GPUs against float64, on the emulated GPU and on a real one."""

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
from dense import bounds
from helpers import DEEPER, distance, launch
from test_kernels import TENSORS, dense, plain, random_intervals, tensors

from a2d_mpi.core.dtypes import DTYPES, compute_dtype
from a2d_mpi.masks.intervals import Intervals

SHAPES = {
    "emulated": [(1, 1, 1, 1, 5), (3, 70, 4, 2, 40), (75, 34, 2, 1, 32)],
    # Each axis once, and small: one core computes the float64 results.
    "real": [(1, 1, 4, 4, 7), (1009, 517, 4, 1, 256), (1009, 1009, 4, 4, 128)]
    + [(2048, 2048, 2, 2, 64)],
}


def plain_kernel(cupy, dtype, scale):
    from a2d_mpi.devices.cuda import Cuda
    from a2d_mpi.kernels.cupy import CupyKernel

    return CupyKernel(Cuda.current(), dtype, scale)


def run(cupy, kernel, q, k, v, dout, intervals, exact, wide=True, fresh=False):
    """Return all results; the backward pass gets the statistics of `exact`, in float64."""
    intervals = Intervals.of(intervals)  # they keep what queued launches read, as those of plans
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
    """Describe results that are out of the bounds for `q.dtype`.

    `exact` are the plain ones in float64.
    """
    given = (q, k, v, dout), dense(intervals, len(k)), scale, None, None, exact, q.dtype
    largest = bounds(*given, products=products)
    # Results were added to 7.
    slack = 7 * float(np.finfo(compute_dtype(q.dtype)).eps) if slack is None else slack
    found = {x: distance(y, exact[x]) for x, y in found.items()}
    return [(x, found[x], largest[x]) for x in found if not found[x] <= largest[x] + slack]


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


@pytest.mark.parametrize("element, headdim", [
    (1, 128), *(pytest.param(*x, marks=DEEPER) for x in ((0, 256), (2, 256), (3, 64))),
])  # fmt: skip
def test_kernels_compile(element, headdim):
    """Kernels compile for A100 and H100, and spill no registers except in float64."""
    if shutil.which("nvcc") is None:
        pytest.skip("no GPU compiler: nvcc is not installed")
    log = compiler_log(f"-DELEMENT={element}", f"-DHEADDIM={headdim}")
    assert log.count("for 'sm_90'") == log.count("for 'sm_80'") == 19
    if element < 3:
        assert "0 bytes spill stores" in log
        assert all(x.startswith("0 ") for x in _in_memory(log))


@pytest.mark.parametrize("element", range(4))
def test_kernels_compile_as_cupy_does_it(element):
    """NVRTC compiles the kernels with the options of CuPy 14."""
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
        results.append(launch(0, "-c", code, timeout=100).stdout)
    assert results[0] == results[1] and len(results[0]) > 1000


@pytest.mark.parametrize("wide", [False, True], ids=["native", "float32"])
def test_sums_of_three_at_once(cupy, wide):
    """Up to three arrays are copied or added, whatever their dtypes and heads."""
    from a2d_mpi.devices.cuda import Cuda

    device, rng = Cuda.current(), np.random.default_rng(0)
    half, single = np.dtype(np.float16), np.dtype(np.float32)
    parts, expected = [], []
    for n, heads, dtype, add in ((5, 4, half, True), (7, 2, single, True), (3, 1, half, False)):
        to, x = rng.standard_normal((n, heads, 6)), rng.standard_normal((n, 4, 6))
        to, x = to.astype(dtype), x.astype(single if wide else half)
        sums = x.reshape(n, heads, -1, 6).astype(float).sum(2)
        expected.append((to.astype(float) * add + sums).astype(dtype))
        parts.append((device.upload(to), device.upload(x), add))
    for number in (1, 2, 3):
        copies = [(device.upload(device.download(to)), x, add) for to, x, add in parts[:number]]
        device.put_all(copies)
        for (found, _, _), right in zip(copies, expected):
            np.testing.assert_allclose(device.download(found), right, 2e-3, 2e-3)


def test_views_at_odd_addresses_are_copied(cupy):
    """Also of contiguous arrays: cuDNN reads 16 bytes at once."""
    from a2d_mpi.devices.cuda import Cuda

    whole = cupy.asarray(np.arange(64 * 3, dtype=np.float16).reshape(3, 64))
    flat = whole.reshape(-1)
    for x, copied in ((whole, False), (flat[8:], False), (flat[1:], True), (whole[:, 8:40], True)):
        taken = Cuda.current().contiguous(x)
        assert (taken is not x) == copied and taken.data.ptr % 16 == 0
        assert (cupy.asnumpy(taken) == cupy.asnumpy(x)).all()
