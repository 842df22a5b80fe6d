"""CuPy arrays: the same calls and bounds as on the host, by device and by host transfers.

On the emulated GPU of tests/gpu/emulated always, on a real one where there is one.
"""

import re
from functools import partial

import helpers
import numpy as np
import pytest
from cases import METHODS, OTHERS, SIZE, differing, label
from dense import problem_for, results_of, wrong_with
from helpers import DEEPER, SAMPLE, assert_all, assert_refused, deeper, drive_on_gpu, read_run
from mpi4py import MPI
from oracles import sinks
from refused import GOOD, assert_raises

from a2d_mpi import Attention2D, Causal, Full, NodeAwareAttention, ProcessGrid
from a2d_mpi.comm.device_transport import DeviceTransport
from a2d_mpi.comm.gpus import gpu_aware
from a2d_mpi.results.hdf5 import BENCHMARK_SCHEMA, flat, read_file

pytestmark = pytest.mark.grids


# seqlen, nheads_kv (of 6), headdim, headdim_v: the emulated one is slow.
SIZES = {
    "emulated": [(1, 6, 7, 7), (23, 1, 9, 5)],
    "real": [(1, 6, 32, 32), (1009, 1, 64, 64), (2048, 6, 128, 128), (1009, 2, 192, 128)],
}


KINDS = [METHODS[(len(METHODS) - 1) // 2], METHODS[-1], OTHERS[-1]]
# A node passes several chunks of one kind on to the same rank.
KINDS += [(NodeAwareAttention, (1, SIZE))] * (SIZE == 6)


@pytest.fixture(scope="module", params=KINDS, ids=label)
def method(request, comm):
    algorithm, shape = request.param
    nodes = np.arange(SIZE) // 2 if algorithm is NodeAwareAttention else None
    grid = ProcessGrid(comm, *shape, nodes=nodes)
    yield partial(algorithm, grid)
    grid.free()


# Each one once; on a real GPU cuDNN builds graphs for each plan of 16 bits.
CASES = [
    ("real", Full(), "float32", "device"),
    ("real", Causal(), "float64", "host"),
    ("real", Causal(), "bfloat16", "device"),
    ("real", Full(), "bfloat16", "host"),
    ("emulated", Full(), "float32", "device"),
    ("emulated", Causal(), "float64", "host"),
    pytest.param("emulated", sinks(3, 10, 23), "float32", "device", marks=pytest.mark.one_mpi),
    pytest.param("emulated", Causal(), "float16", "device", marks=DEEPER),
    pytest.param("emulated", Causal(), "bfloat16", "host", marks=pytest.mark.one_mpi),
]


@pytest.mark.mpi
@pytest.mark.parametrize("cupy, mask, dtype, transfers", CASES, indirect=["cupy"])
def test_results(comm, cupy, gpus, method, mask, dtype, transfers, monkeypatch):
    """Results equal float64, bytes what is predicted; times by events add up."""
    # Several pieces a message, but not thousands.
    size = {"emulated": 700, "real": 100_000}[cupy.kind]
    monkeypatch.setattr("a2d_mpi.comm.device_transport.STAGED_MESSAGE", size)
    bad = []
    for seqlen, nheads_kv, headdim, headdim_v in SIZES[cupy.kind]:
        sizes = {"seqlen": seqlen, "nheads": 6, "nheads_kv": nheads_kv}
        sizes |= {"headdim": headdim, "headdim_v": headdim_v}
        plan = method(mask, **sizes, dtype=dtype, transfers=transfers)
        bad += wrong_with(plan, **gpus)
        if plan.traffic.bytes != plan.predicted_traffic():
            bad.append(f"{dict(plan.traffic.bytes)} but predicted {plan.predicted_traffic()}")
        moved = sum(sum(both) for both in plan.traffic.bytes.values())
        if plan.staged_bytes != (moved if transfers == "host" else 0):
            bad.append(f"{plan.staged_bytes} bytes went through the host, {moved} moved")
        for phase in ("forward", "backward"):
            parts = [plan.timings[f"{phase}/{part}"] for part in ("compute", "merge", "wait")]
            if not (min(parts) >= 0 and 0 < sum(parts) <= 1.001 * plan.timings[f"{phase}/total"]):
                bad.append(f"{phase}: {plan.timings}")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("transfers", deeper(["device", "host"], ["host"]))
def test_same_bits(comm, cupy, gpus, method, transfers):
    """Again, in turn, and in slices, with kernels that run late and messages that come late."""
    sizes = {"seqlen": 30, "nheads": 6, "headdim": 8, "kernel": "cupy", "transfers": transfers}
    options = {}, {}, {"overlap": False}, {"slices": 3}
    plans = [method(Causal(), **sizes, **x) for x in options]
    first, *others = (results_of(plan, problem_for(plan), **gpus) for plan in plans)
    bad = [f"{o}: {x}" for o, y in zip(options[1:], others) for x in differing(first, y)]
    assert_all(comm, not bad, f"not the same bits: {bad}")


@pytest.mark.mpi
@pytest.mark.multirank
@pytest.mark.one_mpi
@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
def test_the_host_posts_a_slice_while_kernels_of_another_run(comm, grid_of, gpus, monkeypatch):
    """With h slices, all messages of two slices are posted before the host waits at all."""
    log = []
    for name in ("send", "receive", "wait"):
        right = getattr(DeviceTransport, name)

        def logged(self, *args, right=right, name=name):
            log.append(name)
            return right(self, *args)

        monkeypatch.setattr(DeviceTransport, name, logged)
    posted = []
    for slices in (1, 2):
        plan = Attention2D(grid_of(1, SIZE), Full(), seqlen=61, nheads=6, headdim=8, slices=slices)
        log.clear()
        results_of(plan, problem_for(plan), **gpus)
        posted.append(log.index("wait"))
    assert_all(comm, posted[1] == 2 * posted[0] > 0, f"posted before the first wait: {posted}")


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_calls_on_two_streams(comm, cupy, gpus, method):
    """A call uses the buffers of an earlier call that may still be running."""
    plan = method(Causal(), seqlen=64, nheads=6, headdim=16)
    q, k, v, _ = problem_for(plan).shards(plan).values()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    outs = []
    for stream, given in zip(reversed(streams), ((q, k, v), (2 * q, -k, 2 * v))):
        with stream:
            outs.append(plan.forward(*map(cupy.asarray, given))[0])
    for stream in streams:
        stream.synchronize()
    found = cupy.asnumpy(outs[0])
    alone = cupy.asnumpy(plan.forward(*map(cupy.asarray, (q, k, v)))[0])
    assert_all(comm, found.tobytes() == alone.tobytes(), "the calls disturb each other")


MIXED = "some ranks pass NumPy arrays, others CuPy arrays"


@pytest.mark.mpi
@pytest.mark.one_mpi
@pytest.mark.parametrize("options, text", [
    ({"kernel": "numpy"}, "'numpy' does not take CuPy arrays"),
    pytest.param({}, MIXED, marks=pytest.mark.multirank),
])  # fmt: skip
def test_refused(comm, grid_of, gpus, options, text):
    """One error on all ranks; the plan takes arrays of the host all the same, before and after."""
    plan = Attention2D(grid_of(1, comm.size), Full(), **GOOD, **options)
    q, k, v, _ = host = [*problem_for(plan).shards(plan).values()]
    upload = (lambda x: x) if text == MIXED and comm.rank == 0 else gpus["upload"]
    expected, _ = plan.forward(q, k, v)
    assert_raises(comm, text, plan.forward, *map(upload, (q, k, v)))
    same = np.array_equal(plan.forward(*host[:3])[0], expected)
    if not options:  # the plan moves to whichever device the arrays are on
        found = gpus["download"](plan.forward(*map(gpus["upload"], host[:3]))[0])
        same &= np.allclose(found, expected, atol=1e-6)
    assert_all(comm, same, "the plan is spoilt")


@pytest.mark.parametrize("transfers", deeper(["device", "host"], ["device"]))
def test_main_job(monkeypatch, tmp_path, transfers):
    """Each of two ranks takes one of two GPUs."""
    output = tmp_path / "run.h5"
    options = ["--seqlen", 50, "--backward", "--check", "full", "--trials", 2, "--output", output]
    options += ["--device", "gpu", "--transfers", transfers]
    done = drive_on_gpu(monkeypatch, "attention.py", 2, SAMPLE, *options, gpus=2)
    assert "FAILED" not in done.stdout and "emulated GPU" in done.stdout
    result = read_run(output)
    assert result["origin"]["device"] == "emulated GPU"
    assert result["config"]["device"] == "gpu"
    assert result["config"]["transfers"] == {"device": "direct", "host": "host"}[transfers]


# cuDNN's stand-in, which refuses all graphs with `refuse`.
CUDNN = """
import sys
sys.path.append(sys.argv.pop(1))
from graphs import HostGraphs
from a2d_mpi.kernels import cudnn
cudnn.graphs_of = lambda *_: HostGraphs({refuse})
"""


@pytest.mark.parametrize("refuse", [(), ("full", "causal", "general")], ids=["takes", "refuses"])
def test_who_computes(monkeypatch, tmp_path, refuse):
    """The print-out and the file say how many blocks cuDNN refused, which all checks pass."""
    output, emulated = tmp_path / "run.h5", helpers.ROOT / "tests" / "gpu" / "emulated"
    sabotage = CUDNN.format(refuse=refuse).replace("sys.argv.pop(1)", repr(str(emulated)))
    options = ["--seqlen", 70, "--backward", "--check", "full", "--trials", 1, "--output", output]
    options += ["--device", "gpu", "--dtype", "bfloat16", "--mask", "causal"]
    done = drive_on_gpu(monkeypatch, "attention.py", 2, SAMPLE, *options, sabotage=sabotage)
    kernel = "cupy" if refuse else "cudnn"
    result = read_run(output)
    assert result["config"]["kernel"] == "cudnn"
    for phase in ("forward", "backward"):
        (found,) = result["blocks"][phase].items()
        assert found[0] == kernel and found[1].all()
        assert f"of the slowest; {found[1].sum()} blocks by {kernel}\n" in done.stdout
        line = next(x for x in done.stdout.splitlines() if x.startswith(f"{phase}: "))
        assert kernel in line


@pytest.mark.parametrize("gpus", [0, None])
def test_no_gpu(monkeypatch, gpus):
    """One line says what is missing."""
    options = [SAMPLE, "--device", "gpu"]
    if gpus is None:  # not even CuPy; on a machine that has it, a GPU may be there
        without = "sys.modules['cupy'] = None"
        done = helpers.drive("attention.py", 2, *options, sabotage=without, code=2)
    else:
        done = drive_on_gpu(monkeypatch, "attention.py", 2, *options, gpus=gpus, code=2)
    assert_refused(done, "CuPy is not installed" if gpus is None else "finds no GPU")


@pytest.mark.parametrize("transfers", deeper(["device", "host"], ["device"]))
def test_a_fault_of_one_gpu_ends_all_ranks(monkeypatch, transfers):
    """After a fault CUDA's events are never done, so ranks must not wait for them forever."""
    sabotage = """
import cupy
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    cupy.cuda.fault.kernel = "forward"
"""
    options = [SAMPLE, "--seqlen", 50, "--device", "gpu", "--transfers", transfers]
    done = drive_on_gpu(monkeypatch, "attention.py", 4, *options, sabotage=sabotage, code=None)
    assert done.returncode != 0
    assert "attention.py: rank 1 failed" in done.stderr
    assert "CUDARuntimeError: cudaErrorIllegalAddress" in done.stderr


@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
@pytest.mark.parametrize("behind", ["send", "receive"])
def test_what_has_arrived_waits_for_no_kernel(cupy, behind):
    """Nor for messages that do: they are sent when it ends, or into a buffer that it reads."""
    from a2d_mpi.devices.cuda import Cuda

    comm, transport = MPI.COMM_SELF, DeviceTransport(Cuda.current(), staged=True)
    host = [np.full(40, i, np.uint8) for i in (1, 2)]
    early, late = cupy.empty((40,), np.uint8), cupy.empty((40,), np.uint8)
    messages = transport.receive(comm, early, 0, 1)
    runs = [True]
    kernel = lambda: cupy.cuda.BLOCKED if runs else late._host.fill(2)  # noqa: E731
    cupy.cuda.get_current_stream()._enqueue(kernel)
    sent = []
    if behind == "send":
        messages += transport.send(comm, late, 0, 2)
    else:
        messages += transport.receive(comm, late, 0, 2)
        sent = [comm.Isend(host[1], 0, 2)]
        advance(transport, comm)
    sent += [comm.Isend(host[0], 0, 1)]
    advance(transport, comm)
    assert (early._host == 1).all() and (late._host == 255).all()
    runs.clear()
    if behind == "send":
        sent += [comm.Irecv(host[1], 0, 2)]
    transport.wait(messages)
    MPI.Request.Waitall(sent)
    assert (late._host == 2).all() and (host[1] == 2).all()


def advance(transport, comm):
    for _ in range(20):
        transport.poll(comm)


CPU_TORCH = """
import sys, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_available=lambda: False)
"""


def test_benchmark_of_kernels(monkeypatch, tmp_path):
    sizes = ["--device", "gpu", "--shapes", "40x2x8", "--nheads-kv", "1", "--trials", "3"]
    sizes += ["--output", tmp_path / "gpu.h5", "--name", "here", "--masks"]
    masks = ["full", "sliding_window_causal:4", "causal_document:0,9,17,20,29,40"]
    done = drive_on_gpu(
        monkeypatch, "bench.py kernels", 0, *sizes, ",".join(masks), sabotage=CPU_TORCH
    )
    assert len(re.findall(r"^40x2x8/[sc]\w+:.* \d\.\d+$", done.stdout, re.MULTILINE)) == 4
    assert "causal_document:0,9,17,20,29,40" in done.stdout and "torch has no GPU" in done.stderr
    found = read_file(tmp_path / "gpu.h5", BENCHMARK_SCHEMA)["figures"]["here"]
    assert {x.split("/")[1] for x in flat(found)} == set(masks)
    assert found["origin"]["device"] == "emulated GPU" and found["right"]
    assert all((x > 0).all() and len(x) == 3 for x in flat(found).values())


ONCE = """
import a2d_mpi.checks.timing as m
measured = m.in_turn
m.in_turn = lambda calls, *others, device, **more: measured(calls, 1, device=device, warmup=0)
"""


@pytest.mark.parametrize("way, staged", [("device", "0"), ("host", r"[1-9]\d+")])
def test_rate_of_transfers(monkeypatch, way, staged):
    done = drive_on_gpu(monkeypatch, "../tests/gpu/gpu_transfers.py", 2, way, sabotage=ONCE)
    assert done.stdout.count("GB/s per rank") == 3
    assert re.search(f"through the host: {staged} bytes", done.stdout)


def test_who_says_that_mpi_takes_device_memory(monkeypatch):
    for variable in ("A2D_MPI_TRANSFERS", "MPICH_GPU_SUPPORT_ENABLED"):
        monkeypatch.delenv(variable, raising=False)
    assert not gpu_aware()[0]  # the MPI of a wheel
    # Every call of a plan asks; the libraries of the process are looked at once.
    monkeypatch.setattr("a2d_mpi.comm.gpus._mpi_libraries", None)
    assert not gpu_aware()[0]
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    assert gpu_aware() == (True, "MPICH_GPU_SUPPORT_ENABLED")
    monkeypatch.setenv("A2D_MPI_TRANSFERS", "host")
    assert gpu_aware() == (False, "A2D_MPI_TRANSFERS")
    assert gpu_aware("device") == (True, "argument")
    monkeypatch.setenv("A2D_MPI_TRANSFERS", "fast")
    with pytest.raises(ValueError, match="'fast'"):
        gpu_aware()
