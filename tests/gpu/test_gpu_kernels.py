"""The kernels for GPUs against float64, on the emulated GPU and on a real one."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from blocks import Block, gpu_failures, plain_kernel
from helpers import DEEPER, distance, launch

from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import DTYPES, compute_dtype
from a2d_mpi.devices.host import HOST

# Sizes of a block and its soft-cap.
SHAPES = {
    "emulated": [((1, 1, 1, 1, 5), None), ((3, 70, 4, 2, 40), None), ((75, 34, 2, 1, 32), 5.0)]
    + [((19, 37, 8, 2, 24, 16), 5.0), ((37, 19, 8, 2, 192, 128), None)],
    # Each axis once, and small: one core computes the float64 results.
    "real": [((1, 1, 4, 4, 7), None), ((1009, 517, 4, 1, 256), None)]
    + [((1009, 1009, 4, 4, 128), 5.0), ((2048, 2048, 2, 2, 64), None)]
    + [((517, 1009, 8, 2, 24, 16), 5.0), ((1009, 517, 8, 2, 192, 128), None)],
}
DEEPER_SHAPES = [((19, 37, 8, 2, 16, 24), None), ((37, 19, 8, 2, 192, 128), 5.0)]


# On the emulated GPU, which is slow, each mask with two dtypes.
KERNELS = [
    pytest.param(gpu, dtype, kind, marks=[] if gpu == "real" or (i + j) % 2 == 0 else DEEPER)
    for gpu, (i, kind), (j, dtype) in product(
        SHAPES, enumerate(("full", "causal", "one", "two", "band")), enumerate(DTYPES)
    )
]


def failures(cupy, dtype, kind, shapes):
    bad = []
    for shape, cap in shapes:
        block = Block(shape, dtype, kind, cap=cap, size=3.0 if cap else 1.0)
        kernel = plain_kernel(cupy, block)
        bad += [(shape, x) for x in gpu_failures(cupy, kernel, block, poisoned=True)]
        kernel.logit_softcap = None
        if cap and kind == "full" and not gpu_failures(cupy, kernel, block):
            bad.append((shape, "no cap passed"))
    return bad


@pytest.mark.parametrize("cupy, dtype, kind", KERNELS, indirect=["cupy"])
def test_plain_kernel(cupy, dtype, kind):
    """With and without a soft-cap, and values of another width; a kernel without the cap fails."""
    assert not failures(cupy, dtype, kind, SHAPES[cupy.kind])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["full", "causal", "one", "two", "band"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_widths(cupy, dtype, kind):
    """Values that are wider than keys, and narrower ones with a soft-cap."""
    assert not failures(cupy, dtype, kind, DEEPER_SHAPES)


def test_huge_logits_and_padding(cupy):
    intervals = ((np.full(40, 10), 10 + np.arange(40)),)  # the first query sees nothing
    block = Block((40, 50, 2, 2, 16), "float32", intervals, 0.25, size=2500.0)
    kernel = plain_kernel(cupy, block)
    assert not gpu_failures(cupy, kernel, block, poisoned=True, ways=[(True, True)])


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
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            Path(folder, "log").write_text(done.stderr)
            os.replace(f"{folder}/log", kept)
    return kept.read_text()


@pytest.mark.parametrize("element, headdim, headdim_v", [
    (1, 192, 128),
    *(pytest.param(*x, marks=DEEPER) for x in ((0, 256, 256), (2, 256, 256), (3, 64, 64))),
])  # fmt: skip
def test_kernels_compile(element, headdim, headdim_v):
    """Kernels compile for A100 and H100, and spill no registers except in float64."""
    if shutil.which("nvcc") is None:
        pytest.skip("no GPU compiler: nvcc is not installed")
    log = compiler_log(f"-DELEMENT={element}", f"-DHEADDIM={headdim}", f"-DHEADDIM_V={headdim_v}")
    assert log.count("for 'sm_90'") == log.count("for 'sm_80'") == 20
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
    options = [b"--std=c++17", b"-DELEMENT=%d" % element, b"-DHEADDIM=64", b"-DHEADDIM_V=64"]
    options += [b"-arch=sm_90", b"-ftz=true", b"--device-as-default-execution-space"]
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

sys.path[:0] = [{str(here.parent / "support")!r}, {str(here / "emulated")!r}]
import cupy
from blocks import Block, plain_kernel

block = Block((37, 45, 2, 1, 40), "float32", "two", 0.2)
found = block.run(plain_kernel(cupy, block), device=cupy)
print(b"".join(x.tobytes() for x in found.values()).hex())
"""
    for order in ("forwards", "backwards"):
        monkeypatch.setenv("EMULATED_GPU_ORDER", order)
        results.append(launch(0, "-c", code).stdout)
    assert results[0] == results[1] and len(results[0]) > 1000


@pytest.mark.parametrize("wide", [False, True], ids=["native", "float32"])
def test_sums_of_three_at_once(cupy, wide):
    """Up to three arrays are copied or added, whatever their dtypes, heads and widths."""
    from a2d_mpi.devices.cuda import Cuda

    device, rng = Cuda.current(), np.random.default_rng(0)
    half, single = np.dtype(np.float16), np.dtype(np.float32)
    parts, expected = [], []
    for n, heads, width, dtype, add in (
        (5, 4, 6, half, True), (7, 2, 40, single, True), (3, 1, 4, half, False)
    ):  # fmt: skip
        to, x = rng.standard_normal((n, heads, width)), rng.standard_normal((n, 4, width))
        to, x = to.astype(dtype), x.astype(single if wide else half)
        sums = x.reshape(n, heads, -1, width).astype(float).sum(2)
        expected.append((to.astype(float) * add + sums).astype(dtype))
        parts.append((device.upload(to), device.upload(x), add))
    for number in (1, 2, 3):
        copies = [(device.upload(device.download(to)), x, add) for to, x, add in parts[:number]]
        device.put_all(copies)
        for (found, _, _), right in zip(copies, expected):
            np.testing.assert_allclose(device.download(found), right, 2e-3, 2e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sinks_of_devices(cupy, dtype):
    """Sinks of ordinary, huge and masked rows equal their formulas."""
    from a2d_mpi.devices.cuda import Cuda

    rng, eps = np.random.default_rng(0), np.finfo(dtype).eps
    lse = np.repeat(np.array([-np.inf, -3e3, 0.1, 4001.5, 9e4], dtype)[:, None], 4, 1)
    sink = np.array([-np.inf, -50.0, 0.3, 4000.0], dtype)
    out, delta = (rng.standard_normal((5, 4, *d)).astype(dtype) for d in ((6,), ()))
    out[0] = delta[0] = 0
    exact_lse = np.logaddexp(lse.astype(float), sink)
    with np.errstate(over="ignore", invalid="ignore"):  # inf - inf: NaN
        weight = np.nan_to_num(1 / (1 + np.exp(sink.astype(float) - lse)))
    for device in (HOST, Cuda.current()):
        arrays = [device.upload(x.copy()) for x in (out, lse, sink, delta)]
        device.add_sink(*arrays[:3])
        gradient = device.sink_gradient(arrays[1], arrays[3], arrays[2])
        nothing = device.sink_gradient(arrays[1][:0], arrays[3][:0], arrays[2])
        found_out, found_lse, gradient, nothing = map(
            device.download, (*arrays[:2], gradient, nothing)
        )
        assert distance(found_lse, exact_lse) <= eps * 9e4
        assert distance(found_out, out * weight[..., None]) <= 4 * eps * np.abs(out).max()
        assert distance(gradient, reference.sink_gradient(found_lse, delta, sink)) <= 20 * eps
        assert nothing.tolist() == [0] * 4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_over_many_tokens(cupy, dtype):
    """The gradient of a sink: of more tokens than sums; heads do not change each other's bits."""
    from a2d_mpi.devices.cuda import PARTS, Cuda

    rng, device = np.random.default_rng(3), Cuda.current()
    lse, delta = (rng.standard_normal((3 * PARTS + 7, 5)).astype(dtype) for _ in range(2))
    lse[9], delta[9] = -np.inf, np.nan
    sink = rng.standard_normal(5).astype(dtype)
    terms = np.delete(np.exp(sink.astype(float) - lse) * delta, 9, axis=0)
    given = [cupy.asarray(x) for x in (lse, delta, sink)]
    found, again = (cupy.asnumpy(device.sink_gradient(*given)) for _ in range(2))
    assert np.array_equal(found, again)
    largest = 2 * np.finfo(dtype).eps * np.abs(terms).sum(0)
    assert (np.abs(found + terms.sum(0)) <= largest).all()
    some = device.sink_gradient(*(cupy.asarray(x[..., 1:3].copy()) for x in (lse, delta, sink)))
    assert np.array_equal(cupy.asnumpy(some), found[1:3])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_of_lse_of_devices(cupy, dtype):
    """Masked rows, of which they may be NaN, ignore them."""
    from a2d_mpi.devices.cuda import Cuda

    rng = np.random.default_rng(1)
    delta, dlse, lse = (rng.standard_normal((37, 5)).astype(dtype) for _ in range(3))
    lse[3], lse[9, 2] = -np.inf, -np.inf
    dlse[np.isneginf(lse)] = np.nan
    for device in (HOST, Cuda.current()):
        found = device.upload(delta.copy())
        device.subtract(found, *map(device.upload, (dlse, lse)))
        exact = np.where(np.isneginf(lse), delta, delta - dlse)
        assert np.array_equal(device.download(found), exact)


ADDRESSES = [(0, 0), (1, 0), (0, 1), (1, 1)]  # of two arrays, in elements after whole 16 bytes


def placed(cupy, x, after):
    """A copy of x that begins some elements after a multiple of 16 bytes."""
    from a2d_mpi.devices.cuda import Cuda

    whole = cupy.empty((x.size + 16,), x.dtype)
    first = -whole.data.ptr % 16 // x.itemsize + after
    to = whole[first : first + x.size].reshape(x.shape)
    Cuda.current().put(to, cupy.asarray(x))
    return to


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 20, 64, 128, 192, 256, 300])
def test_delta_and_out_of_devices(cupy, dtype, width):
    """Delta, and out of a given delta, have the same bits at all addresses, and are right."""
    from a2d_mpi.devices.cuda import Cuda

    device, rng, dtype = Cuda.current(), np.random.default_rng(2), DTYPES[dtype]
    sums, eps = compute_dtype(dtype), float(ml_dtypes.finfo(dtype).eps)
    dout, out = (rng.standard_normal((13, 3, width)).astype(dtype) for _ in range(2))
    dout[4] = 0
    dout[5] *= dtype.type(1e-4 if dtype == np.float16 else 1e-30)  # the squares underflow
    terms = dout.astype(float) * out.astype(float)
    found = [cupy.asnumpy(device.delta(placed(cupy, dout, i), placed(cupy, out, j)))
             for i, j in ADDRESSES]  # fmt: skip
    assert all(x.dtype == sums and np.array_equal(x, found[0]) for x in found)
    largest = width * np.finfo(sums).eps * np.abs(terms).sum(-1)
    assert (np.abs(found[0] - terms.sum(-1)) <= largest).all()

    lse = rng.standard_normal((13, 3)).astype(sums)
    # A masked query is the last one of 14.
    places = cupy.asarray(np.stack([[*range(13), -1], np.arange(14), np.full(14, 14)]))
    delta, lse_there, results = cupy.asarray(found[0]), cupy.asarray(lse), []
    for i, j in ADDRESSES:
        to, stats = placed(cupy, out, j), cupy.empty((14 * 3,), sums)
        given = placed(cupy, dout, i), delta, to, lse_there, stats, places
        if width * dtype.itemsize > 512:
            with pytest.raises(
                ValueError, match=f"at most 512 bytes, got {width * dtype.itemsize}"
            ):
                device.out_and_stats(*given)
            return
        device.out_and_stats(*given)
        results.append(cupy.asnumpy(to))
        right = np.vstack([lse, np.full((1, 3), np.inf)]).T.ravel()
        assert np.array_equal(cupy.asnumpy(stats), right)
    assert all(np.array_equal(x, results[0]) for x in results)
    again = (dout.astype(float) * results[0].astype(float)).sum(-1)
    assert (np.abs(again - found[0]) <= 2 * eps * np.abs(found[0])).all()
    assert not results[0][4].any()


def test_views_at_odd_addresses_are_copied(cupy):
    """Also of contiguous arrays: cuDNN reads 16 bytes at once."""
    from a2d_mpi.devices.cuda import Cuda

    whole = cupy.asarray(np.arange(64 * 3, dtype=np.float16).reshape(3, 64))
    flat = whole.reshape(-1)
    for x, copied in ((whole, False), (flat[8:], False), (flat[1:], True), (whole[:, 8:40], True)):
        taken = Cuda.current().contiguous(x)
        assert (taken is not x) == copied and taken.data.ptr % 16 == 0
        assert (cupy.asnumpy(taken) == cupy.asnumpy(x)).all()
