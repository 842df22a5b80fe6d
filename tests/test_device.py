"""CuPy arrays: the same calls, the same bounds, by device and by host transfers.

On the emulated GPU of tests/emulated always, on a real one where there is one.
"""

import numpy as np
import pytest
from cases import IDS, METHODS, TENSORS, failures, inputs, run
from helpers import assert_all

from a2d_mpi import Attention2D, Causal, Full, ProcessGrid

# seqlen, nheads_kv (of 4), headdim: the emulated one is slow.
SIZES = {
    "emulated": [(1, 4, 7), (23, 2, 9)],
    "real": [(n, h, d) for n in (1, 1009, 4096) for h in (1, 2, 4) for d in (32, 64, 128, 256)],
}


@pytest.fixture(scope="module", params=METHODS, ids=IDS)
def method(request, comm):
    algorithm, shape = request.param
    grid = ProcessGrid(comm, *shape)
    yield lambda mask, **kwargs: algorithm(grid, mask, **kwargs)
    grid.free()


@pytest.fixture
def on(cupy, comm, request):
    """Runs a plan on CuPy arrays."""
    from a2d_mpi.cuda import bind_gpu

    bind_gpu(comm)
    return lambda plan, *tensors: run(plan, *tensors, cupy.asarray, cupy.asnumpy)


@pytest.mark.mpi
@pytest.mark.parametrize("transfers", ["device", "host"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
def test_results_and_traffic(comm, cupy, on, method, mask, dtype, transfers, monkeypatch):
    monkeypatch.setattr("a2d_mpi.transport.STAGED_MESSAGE", 700)
    bad = []
    for seqlen, nheads_kv, headdim in SIZES[cupy.kind]:
        plan = method(
            mask,
            seqlen=seqlen,
            nheads=4,
            nheads_kv=nheads_kv,
            headdim=headdim,
            dtype=dtype,
            transfers=transfers,
        )
        found = on(plan, *inputs(seqlen, nheads_kv, headdim, 1.0, dtype, 4))
        bad += failures(plan, found, mask, seqlen, nheads_kv, headdim)
        if plan.traffic.bytes != plan.predicted_traffic():
            bad.append(f"{dict(plan.traffic.bytes)} but predicted {plan.predicted_traffic()}")
        moved = sum(sum(both) for both in plan.traffic.bytes.values())
        if plan.staged_bytes != (moved if transfers == "host" else 0):
            bad.append(f"{plan.staged_bytes} bytes went through the host, {moved} moved")
        plan.free()
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
def test_same_bits_every_time_and_without_overlap(comm, cupy, on, method):
    x = inputs(30, 2, 8, 1.0, "float32", 4)
    sizes = {"seqlen": 30, "nheads": 4, "nheads_kv": 2, "headdim": 8, "kernel": "cupy"}
    plans = [method(Causal(), overlap=overlap, **sizes) for overlap in (True, False)]
    results = [on(plan, *x) for plan in (*plans, plans[0])]
    same = all(results[0][t].tobytes() == y[t].tobytes() for y in results for t in TENSORS)
    assert_all(comm, same, "not the same bits")


@pytest.mark.mpi
def test_timings_by_events(comm, cupy, on, method):
    plan = method(Causal(), seqlen=64, nheads=4, headdim=16)
    on(plan, *inputs(64, 4, 16, 1.0, "float32", 4))
    bad = []
    for phase in ("forward", "backward"):
        parts = [plan.timings[f"{phase}/{part}"] for part in ("compute", "merge", "wait")]
        if not (min(parts) >= 0 and 0 < sum(parts) <= 1.001 * plan.timings[f"{phase}/total"]):
            bad.append(f"{phase}: {plan.timings}")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.multirank
def test_numpy_on_some_ranks(comm, cupy, on):
    grid = ProcessGrid(comm, 1, comm.size)
    plan = Attention2D(grid, Full(), seqlen=20, nheads=4, headdim=8)
    x = [np.ones((len(plan.tokens), 4, 8), np.float32) for _ in range(3)]
    mixed = x if comm.rank == 0 else [cupy.asarray(y) for y in x]
    with pytest.raises(ValueError, match="NumPy on some, CuPy on others"):
        plan.forward(*mixed)
    # The plan moves to whichever device the arrays are on.
    out, _ = plan.forward(*x)
    out_device, _ = plan.forward(*(cupy.asarray(y) for y in x))
    assert_all(comm, np.allclose(out, cupy.asnumpy(out_device), atol=1e-6), "results differ")
    grid.free()


@pytest.mark.mpi
def test_kernel_of_the_other_device(comm, cupy, on):
    grid = ProcessGrid(comm, comm.size, 1)
    plan = Attention2D(grid, Full(), seqlen=20, nheads=4, headdim=8, kernel="numpy")
    x = [cupy.asarray(np.ones((len(plan.tokens), 4, 8), np.float32)) for _ in range(3)]
    with pytest.raises(ValueError, match="'numpy' does not take CuPy arrays"):
        plan.forward(*x)
    grid.free()


@pytest.mark.mpi
def test_masks_of_two_intervals(comm, cupy, on, method):
    class Sinks(Causal):
        """The first 3 tokens, and the last 10."""

        default_distribution = "striped"

        def visible(self, q):
            return ((q * 0, np.minimum(3, q + 1)), (np.maximum(3, q - 9), q + 1))

    plan = method(Sinks(), seqlen=30, nheads=4, headdim=8)
    found = on(plan, *inputs(30, 4, 8, 1.0, "float32", 4))
    bad = failures(plan, found, Sinks(), 30, 4, 8)
    assert_all(comm, not bad, "; ".join(bad))
