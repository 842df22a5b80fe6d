"""A gradient of lse in the backward pass, against float64 and finite differences."""

import numpy as np
import pytest
from cases import METHODS, NHEADS, OTHERS, SIZE, label
from dense import problem, wrong_with
from helpers import assert_all
from test_bad_input import assert_raises

from a2d_mpi import (
    Attention2D,
    Causal,
    Full,
    IntervalMask,
    NodeAwareAttention,
    TriangleAttention,
)
from a2d_mpi.attention.executor import Executor
from a2d_mpi.devices.host import HOST

N, D = 61, 16
HIDDEN = IntervalMask(np.arange(N) // 20 * 20, np.where(np.arange(N) % 7, np.arange(N) + 1, 0))
NOBODY = IntervalMask(np.zeros(40, int), np.arange(40) // 3)  # the first queries see nothing
PLANS = METHODS + OTHERS + [(NodeAwareAttention, (1, SIZE))]
PLANS += [(TriangleAttention, (1, SIZE))] * (SIZE in (1, 6))
CASES = (
    (Full(), "float32", NHEADS), (Causal(), "float64", 1), (HIDDEN, "float32", 2),
    (Causal(), "bfloat16", NHEADS), (HIDDEN, "float16", 1),
)  # fmt: skip


def case_of(method, grid, mask, dtype, nheads_kv):
    """Return a plan and its problem; float16 has a sink."""
    sizes = {"seqlen": N, "nheads": NHEADS, "nheads_kv": nheads_kv, "headdim": D}
    plan = method(grid, mask, dtype=dtype, **sizes)
    return plan, problem(mask, plan.config, dtype == "float16", with_dlse=True)


@pytest.fixture
def told(monkeypatch):
    """Note the arguments that kernels get from plans beside arrays."""
    begin, found = Executor.begin, []

    def noted(self, engine, channels, given, options, *others):
        found.append(options)
        begin(self, engine, channels, given, options, *others)

    monkeypatch.setattr(Executor, "begin", noted)
    return found


@pytest.mark.mpi
@pytest.mark.grids
@pytest.mark.parametrize("method", PLANS, ids=label)
def test_plans(comm, grid_of, method):
    grid, bad = grid_of(*method[1]), []
    for mask, dtype, nheads_kv in CASES:
        if method[0] is TriangleAttention and not isinstance(mask, Causal):
            continue
        plan, given = case_of(method[0], grid, mask, dtype, nheads_kv)
        bad += wrong_with(plan, given, given.dlse)
        if plan.traffic.bytes != plan.predicted_traffic():
            bad.append(f"{dict(plan.traffic.bytes)} but predicted {plan.predicted_traffic()}")
        if not comm.allreduce(len(wrong_with(plan, given, -given.dlse))):
            bad.append("dlse of the other sign passed")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_plan_on_a_gpu(comm, grid_of, cupy, told):
    from a2d_mpi.comm.gpus import bind_gpu

    bind_gpu(comm)
    grid, bad = grid_of(*OTHERS[-1][1]), []
    for case in (CASES[2], CASES[4]):
        plan, given = case_of(OTHERS[-1][0], grid, *case)
        bad += wrong_with(plan, given, given.dlse, cupy.asarray, cupy.asnumpy)
        bad += ["cuDNN would compute"] * (not told[-1]["any_delta"])
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_devices_ignore_masked_rows(cupy, dtype):
    from a2d_mpi.devices.cuda import Cuda

    rng = np.random.default_rng(1)
    delta, dlse, lse = (rng.standard_normal((37, 5)).astype(dtype) for _ in range(3))
    lse[3], lse[9, 2] = -np.inf, -np.inf
    dlse[np.isneginf(lse)] = np.nan
    exact = np.where(np.isneginf(lse), delta, delta - dlse)
    x, y, z = map(cupy.asarray, (delta, dlse, lse))
    Cuda.current().subtract(x, y, z)
    HOST.subtract(delta, dlse, lse)
    assert np.array_equal(delta, exact) and np.array_equal(cupy.asnumpy(x), exact)


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["all", "last"])
def test_bad_input(comm, grid_of, told, where):
    """A bad dlse is one error on all ranks."""
    grid = grid_of(1, comm.size)
    here = where == "all" or comm.rank == comm.size - 1
    plan = Attention2D(grid, Full(), seqlen=40, nheads=4, headdim=8)
    x = np.ones((len(plan.tokens), 4, 8), np.float32)
    dlse = np.zeros(x.shape[:2], np.float32)
    results = plan.forward(x, x, x)
    for wrong, text in (
        (dlse[:, :3], ", 3) and dtype float32, but this shard needs"),
        (dlse.astype(float), "and dtype float64, but this shard needs"),
        (dlse.tolist(), "dlse "),
        *[(None, "ranks disagree on dlse: some ranks pass it, others do not")]
        * (comm.size > 1 and where == "last"),
    ):
        given = wrong if here else dlse
        assert_raises(comm, text, plan.backward, x, x, x, x, *results, dlse=given)
    checking = Attention2D(grid, NOBODY, seqlen=40, nheads=4, headdim=8, check_finite=True)
    x = np.ones((len(checking.tokens), 4, 8), np.float32)
    results = checking.forward(x, x, x)
    dlse = np.where(np.isneginf(results[1]), np.float32(np.nan), 0)  # ignored
    checking.backward(x, x, x, x, *results, dlse=dlse)
    assert_all(comm, told[-1]["careful"] is False, "a careful kernel is slower")
    wrong = dlse * 0 + np.float32(np.inf) if here else dlse
    text = "dlse: NaN or infinite elements (check_finite)"
    assert_raises(comm, text, checking.backward, x, x, x, x, *results, dlse=wrong)
    x = np.ones((len(plan.tokens), 4, 8), np.float32)
    results, dlse = plan.forward(x, x, x), np.zeros(x.shape[:2], np.float32)
    dq, *_ = plan.backward(x, x, x, x, *results, dlse=dlse)  # the plan still works
    assert_all(comm, np.isfinite(dq).all(), "wrong")
