"""cuDNN graphs: what is refused, kept and built; launching them needs a GPU.

cuDNN builds plans for a device that is described, not there, as long as a driver's library is
there that reports no device.  The builds run in a process of their own with a stand-in for that
library: ``python tests/unit/test_graphs.py libcuda.so.1 NAME PASS`` prints what was built.
"""

import ctypes
import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from a2d_mpi.kernels import graphs
from a2d_mpi.kernels.cudnn_blocks import Block, supported
from a2d_mpi.kernels.graphs import Graphs, NotSupported

BLOCK = Block("bfloat16", 16, 16, 128, nq=512, nk=1024, shape="full", scale=0.1)

# As cuDNN writes the properties of a device.
DEVICE = {
    "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536, "smCountOrigin": 0, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "reservedSharedMemoryPerBlock": 1024, "oversizedSharedMemoryPerBlock": 0,
    "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1,
    "cudaDeviceId": 0, "driverVer": 13000,
}  # fmt: skip
DIFFERENT = (
    "deviceName", "deviceVer", "multiProcessorCount", "maxSharedMemoryPerBlockOptin",
    "totalGlobalMem", "smClockRateKHz", "memClockRateKHz", "memoryBusWidth", "l2CacheSize",
)  # fmt: skip
DEVICES = {
    "H200": ("NVIDIA H200", 900, 132, 232448, 150_754_820_096, 1_980_000, 3_201_000, 6144,
             62_914_560),
    "A100": ("NVIDIA A100-SXM4-80GB", 800, 108, 166912, 85_899_345_920, 1_410_000, 1_593_000, 5120,
             41_943_040),
}  # fmt: skip
DEVICES = {name: DEVICE | dict(zip(DIFFERENT, x)) for name, x in DEVICES.items()}

# What cuDNN looks for in the driver's library; all but two of them fail when called.
DRIVER = """
    GetErrorString GetErrorName ModuleGetFunction ModuleLoadData ModuleUnload CtxGetCurrent
    CtxGetLimit CtxPopCurrent CtxPushCurrent DeviceGet KernelGetAttribute KernelGetFunction
    KernelSetAttribute LaunchCooperativeKernel LaunchKernel LaunchKernelEx LibraryGetKernel
    LibraryLoadData LibraryLoadFromFile LibraryUnload LinkAddData LinkComplete LinkCreate
    LinkDestroy OccupancyMaxPotentialClusterSize StreamGetCtx TensorMapEncodeIm2col
    TensorMapEncodeTiled
"""


PASSES = {"forward": False, "backward": True, "deterministic": True}  # whether it is backward


def cases(name):
    """Return (block, backward) of all graphs of a pass."""
    shapes = [("full", 1003, 517, 0), ("band", 517, 1003, 100), ("general", 1003, 517, 0)]
    shapes += [(shape, 517, 1003, 0) for shape in ("causal", "anti-causal")]
    kinds = [("bfloat16", 2, 64), ("float16", 16, 64), ("bfloat16", 16, 128), ("float16", 2, 128)]
    kinds += [("bfloat16", 2, 256), ("float16", 16, 256)]
    blocks = [
        Block(dtype, 16, nheads_kv, headdim, nq, nk, shape, 0.1, window)
        for (dtype, nheads_kv, headdim), (shape, nq, nk, window) in itertools.product(
            kinds, shapes
        )
    ]
    odd = [("full", 1, 1), ("full", 1, 777), ("causal", 1, 777), ("full", 7, 1), ("causal", 2, 3)]
    odd += [("anti-causal", 1, 3), ("anti-causal", 2, 3), ("general", 2, 3), ("general", 7, 1)]
    blocks += [dataclasses.replace(BLOCK, shape=shape, nq=nq, nk=nk) for shape, nq, nk in odd]
    blocks += [dataclasses.replace(BLOCK, headdim=headdim) for headdim in (8, 32, 80, 192, 100)]
    blocks += [dataclasses.replace(BLOCK, shape="band", window=w) for w in (1, 1024, 5000)]
    if name == "deterministic":  # ragged ones would take too much memory
        return [(block, PASSES[name]) for block in blocks]
    ragged = {"nq": 1024, "nk": 2048, "batch": 32, "total": 9216}
    blocks += [
        Block(dtype, 16, nheads_kv, headdim, shape=shape, scale=0.1, window=window, **ragged)
        for dtype, nheads_kv, headdim in kinds
        for shape, window in (("full", 0), ("causal", 0), ("anti-causal", 0), ("band", 100))
    ]
    change = {**ragged, "batch": 1, "nk": 1024, "shape": "causal"}
    headdims = (32, 80, 192) if PASSES[name] else (8, 32, 192)
    blocks += [dataclasses.replace(BLOCK, **change, headdim=d) for d in headdims]
    blocks += [dataclasses.replace(BLOCK, **change | {"shape": x}) for x in ("full", "causal")]
    return [(block, PASSES[name]) for block in blocks]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("of_pass", PASSES)
def test_all_that_is_called_supported_is_built(name, of_pass, tmp_path):
    if importlib.util.find_spec("cudnn") is None:
        pytest.skip("no GPU packages: nvidia-cudnn-frontend is not installed")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no GPU driver, and no C compiler to make a stand-in")
    driver = tmp_path / "libcuda.so.1"
    source = "".join(f"int cu{name}(void) {{ return 100; }}\n" for name in DRIVER.split())
    source += "int cuDeviceGetCount(int *n) { *n = 0; return 0; }\n"
    source += "int cuDriverGetVersion(int *n) { *n = 13000; return 0; }\n"
    command = [compiler, "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(driver)]
    command += ["-Wl,-soname,libcuda.so.1"]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    command = [sys.executable, __file__, str(driver), name, of_pass]
    # No cache of plans, no log: only what is asked for goes to stdout.
    env = {key: value for key, value in os.environ.items() if not key.startswith("CUDNN_")}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    built = json.loads(run.stdout.splitlines()[-1])

    capability = divmod(DEVICES[name]["deviceVer"] // 10, 10)
    wrong = []
    for case, outcome in zip(cases(of_pass), built, strict=True):
        reason = supported(case[0], capability, case[1], of_pass == "deterministic")
        # A graph is built, or there is a reason why not, and the caller could have known it.
        unsafe = "may be NaN" in str(reason)  # whether it is built or not
        if not unsafe and isinstance(outcome, int) != (reason is None):
            wrong.append((case, outcome, reason))
    assert not wrong


def build(driver, name, of_pass):
    """Print the workspace of each case, or the reason why there is no graph."""
    ctypes.CDLL(driver, ctypes.RTLD_GLOBAL)
    import cudnn

    device = DEVICES[name]
    properties = cudnn.create_device_properties(json.dumps(device))
    target = {"device_property": properties, "sm_version": device["deviceVer"] // 10}
    found = Graphs(of_pass == "deterministic", target)
    outcomes = []
    for case in cases(of_pass):
        try:
            outcomes.append(found.get(*case).workspace_size)
        except NotSupported as error:
            outcomes.append(str(error))
    print(json.dumps(outcomes))


FORWARD, FIXED = {"backward": False}, {"deterministic": True}


@pytest.mark.parametrize("major, options, change, reason", [
    *[(x, {}, {}, None) for x in (8, 9, 10, 12)], (7, {}, {}, "7, 0"),
    (9, {}, {"headdim": 100}, "multiple of 8"), (9, {}, {"headdim": 256}, None),
    (8, FORWARD, {"headdim": 256}, None), (8, {}, {"headdim": 256}, "limit of headdim is 128"),
    (10, FORWARD, {"headdim": 256, "nq": 1}, "limit of headdim is 128"),
    (9, {}, {"headdim": 264}, "limit of headdim is 256"),
    *[(x, {}, {"shape": "general"}, None) for x in (9, 10)],
    *[(x, {}, {"shape": "general"}, "general mask") for x in (8, 12)],
    (8, FORWARD, {"shape": "general"}, None), (9, FORWARD, {"nq": 1, "nk": 1}, None),
    (9, {}, {"nq": 1, "nk": 1}, "one query"), (9, {}, {"nq": 1}, "one query"),
    (9, {}, {"nk": 192}, "192 keys may be NaN"), (9, {}, {"nk": 256}, None),
    (9, {}, {"nk": 192, "shape": "causal", "nq": 192}, None), (8, {}, {"nk": 192}, None),
    (9, {}, {"nk": 192, "batch": 1}, None), (9, FORWARD, {"nk": 192}, None),
    (9, {}, {"nheads_kv": 2}, None), (9, {}, {"batch": 4}, None), (8, FORWARD, {"batch": 4}, None),
    (9, FORWARD, {"batch": 4, "headdim": 40}, None),
    *[(x, {}, {"batch": 4}, "ragged gradients") for x in (8, 12)],
    (9, FIXED, {"batch": 4}, "ragged"), (9, {}, {"batch": 4, "headdim": 40}, "multiple of 16"),
    (9, {}, {"batch": 4, "nq": 1, "nk": 1}, None),
])  # fmt: skip
def test_supported(major, options, change, reason):
    told = supported(dataclasses.replace(BLOCK, **change), (major, 0), **options)
    assert told is None if reason is None else reason in told


def test_missing_and_old_packages(monkeypatch):
    modules = [
        SimpleNamespace(backend_version=lambda x=backend: x, __version__=frontend)
        for backend, frontend in ((91100, "1.22.0"), (92800, "1.18.0"))
    ]
    for module in (None, *modules, SimpleNamespace(backend_version=lambda: 92800)):
        monkeypatch.setitem(sys.modules, "cudnn", module)
        with pytest.raises(ImportError, match=r"nvidia-cudnn-frontend.*nvidia-cudnn-cu13"):
            Graphs()


@pytest.fixture
def launched(monkeypatch):
    """Return graphs on a stand-in for cuDNN, and the list of its calls."""
    log = []

    class Refusal(Exception):
        pass

    class Graph:
        def execute(self, pack, workspace, handle):
            log.append(("launch", pack, workspace, handle))

    def fake_build(self, block, backward):
        log.append(("build", block.nq, backward))
        if block.nq == 13:
            raise Refusal("no engine for ____\n{plan}")
        if block.nq == 14:
            raise RuntimeError
        return Graph(), block.nq

    cudnn = SimpleNamespace(
        __version__="1.22.0",
        backend_version=lambda: 92800,
        cudnnGraphNotSupportedError=Refusal,
        create_handle=lambda: 77,
        set_stream=lambda handle, stream: log.append(("stream", handle, stream)),
        destroy_handle=lambda handle: log.append(("destroy", handle)),
    )
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(graphs.Graphs, "_build", fake_build)
    yield Graphs(), log
    graphs.graphs_of.cache_clear()


def test_graphs_are_built_once(launched):
    found, log = launched
    assert found.get(BLOCK, False).workspace_size == 512
    found.get(BLOCK, False)(range(1, 6), 6, stream=9)
    found.get(dataclasses.replace(BLOCK), False)(range(1, 6), 6, stream=9)
    launch = ("launch", {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}, 6, 77)
    assert log == [("build", 512, False), ("stream", 77, 9), launch, launch]
    log.clear()
    for _ in range(2):
        found.get(BLOCK, True)(range(11, 20), 6, 10)
    launch = ("launch", dict(enumerate(range(11, 20), 1)), 6, 77)
    assert log == [("build", 512, True), ("stream", 77, 10), launch, launch]
    found.free()
    found.free()
    assert log[-2:] == [launch, ("destroy", 77)]


def test_a_general_launch_reads_the_hidden_logit_from_the_host(launched):
    found, log = launched
    found.get(dataclasses.replace(BLOCK, shape="general"), False)(range(1, 8), 6, stream=9)
    pack = log[-1][1]
    assert [pack[i] for i in range(1, 8)] == list(range(1, 8)) and len(pack) == 8
    assert ctypes.c_float.from_address(pack[8]).value == np.float32(graphs.HIDDEN)


def test_plans_share_the_graphs_of_a_device(launched):
    assert graphs.graphs_of(3, False) is graphs.graphs_of(3, False)
    assert graphs.graphs_of(3, True) is not graphs.graphs_of(3, False)
    assert graphs.graphs_of(3, True).deterministic


def test_ragged_graphs_of_newer_frontends(launched, monkeypatch):
    found, _ = launched
    block = dataclasses.replace(BLOCK, batch=4)
    monkeypatch.setattr(sys.modules["cudnn"], "__version__", "1.23.0")
    with pytest.raises(NotSupported, match="offsets"):
        found.get(block, False)
    assert found.get(BLOCK, False)


def test_a_refusal_is_kept(launched):
    found, log = launched
    refused = dataclasses.replace(BLOCK, nq=13)
    for _ in range(2):
        with pytest.raises(NotSupported, match=r"forward pass of Block.*nq=13.*no engine for$"):
            found.get(refused, False)
    assert log == [("build", 13, False)]


def test_a_failure_is_told_once(launched):
    found, _ = launched
    failing = dataclasses.replace(BLOCK, nq=14)
    told = pytest.warns(RuntimeWarning, match="no kernel for the forward pass of Block.*nq=14")
    with told, pytest.raises(NotSupported):
        found.get(failing, False)
    with pytest.raises(NotSupported):
        found.get(failing, False)


if __name__ == "__main__":
    build(*sys.argv[1:])
