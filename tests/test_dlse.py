"""A gradient of lse in the backward pass, against float64 and against differences."""

from functools import cache

import numpy as np
import pytest
from cases import METHODS, NHEADS, OTHERS, SIZE, label
from helpers import assert_all, distance
from test_bad_input import message_of
from test_softcap import TENSORS, bounds, out_of_bounds, plain

from a2d_mpi import (
    Attention2D,
    BlocksAttention,
    Causal,
    Full,
    IntervalMask,
    NodeAwareAttention,
    TriangleAttention,
)
from a2d_mpi.core.dtypes import DTYPES, compute_dtype
from a2d_mpi.devices.host import HOST

N, D = 61, 16
HIDDEN = IntervalMask(np.arange(N) // 20 * 20, np.where(np.arange(N) % 7, np.arange(N) + 1, 0))
NOBODY = IntervalMask(np.zeros(40, int), np.arange(40) // 3)  # the first queries see nothing
PLANS = METHODS + OTHERS + [(BlocksAttention, (1, SIZE)), (NodeAwareAttention, (1, SIZE))]
PLANS += [(TriangleAttention, (1, SIZE))] * (SIZE in (1, 6))
CASES = (
    (Full(), "float32", NHEADS), (Causal(), "float64", 1), (HIDDEN, "float32", 2),
    (Causal(), "bfloat16", NHEADS), (HIDDEN, "float16", 1),
)  # fmt: skip


def test_reference_by_differences():
    """Gradients of a loss in out and lse; the first query sees nothing, or the sink."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((5, h, 3)) for h in (4, 2, 2, 4))
    dlse, sink = rng.standard_normal((5, 4)), rng.standard_normal(4)
    visible = np.tri(5, k=-1, dtype=bool)
    for s in (None, sink):
        exact = plain((q, k, v, dout), visible, 0.7, 1.5, s, dlse=dlse)
        without = plain((q, k, v, dout), visible, 0.7, 1.5, s)
        for name, x in zip(("dq", "dk", "dv", "dsink"), (q, k, v, s)):
            if x is None:
                continue
            numeric = np.empty_like(x)
            for i in np.ndindex(x.shape):
                both, kept = [], x[i]
                for step in (1e-5, -1e-5):
                    x[i] = kept + step
                    found = plain((q, k, v, dout), visible, 0.7, 1.5, s)
                    lse = np.where(np.isneginf(found["lse"]), 0, found["lse"])
                    both.append((found["out"] * dout).sum() + (lse * dlse).sum())
                x[i] = kept
                numeric[i] = (both[0] - both[1]) / 2e-5
            assert distance(numeric, exact[name]) < 1e-8
            assert name == "dv" or distance(numeric, without[name]) > 1e-3


@cache
def problem(mask, dtype, nheads_kv):
    """Inputs, sink, dlse, exact results and their bounds."""
    rng, kept = np.random.default_rng(3), DTYPES[dtype]
    heads, kind = (NHEADS, nheads_kv, nheads_kv, NHEADS), compute_dtype(kept)
    inputs = [rng.standard_normal((N, h, D)).astype(kept).astype(float) for h in heads]
    sink = rng.standard_normal(NHEADS).astype(kind) if dtype == "float16" else None
    dlse = 3 * rng.standard_normal((N, NHEADS)).astype(kind)
    visible = mask.dense(np.arange(N), np.arange(N))
    exact = plain(inputs, visible, D**-0.5, None, sink, dlse=dlse)
    return inputs, sink, dlse, exact, bounds(
        inputs, visible, D**-0.5, None, sink, exact, kept, dlse
    )  # fmt: skip


def results(plan, inputs, sink, dlse, upload=np.asarray, download=np.asarray):
    """All results of a plan; dsink is summed over the ranks."""
    q, k, v, dout = (upload(x[plan.tokens].astype(plan.dtype)) for x in inputs)
    s = None if sink is None else upload(sink)
    out, lse = plan.forward(q, k, v, s)
    dlse = dlse[plan.tokens].copy()
    dlse[np.isneginf(download(lse))] = np.nan  # ignored
    gradients = plan.backward(dout, q, k, v, out, lse, s, dlse=upload(dlse))
    found = dict(zip(TENSORS, map(download, (out, lse, *gradients))))
    if sink is not None:
        found["dsink"] = plan.grid.comm.allreduce(found["dsink"])
    return found


def wrong_with(plan, found, exact, largest):
    """What is out of bounds on this rank, in words."""
    mine = {x: y if x == "dsink" else y[plan.tokens] for x, y in exact.items()}
    return [f"{plan.dtype} {x}" for x in out_of_bounds(found, mine, largest)]


@pytest.mark.mpi
@pytest.mark.grids
@pytest.mark.parametrize("method", PLANS, ids=label)
def test_plans(comm, grid_of, method):
    grid, bad = grid_of(*method[1]), []
    # A placement of blocks takes seconds to search.
    for mask, dtype, nheads_kv in CASES[3 if method[0] is BlocksAttention else 0 :]:
        if method[0] is TriangleAttention and not isinstance(mask, Causal):
            continue
        inputs, sink, dlse, exact, largest = problem(mask, dtype, nheads_kv)
        plan = method[0](
            grid, mask, seqlen=N, nheads=NHEADS, nheads_kv=nheads_kv, headdim=D, dtype=dtype,
        )  # fmt: skip
        bad += wrong_with(plan, results(plan, inputs, sink, dlse), exact, largest)
        if plan.traffic.bytes != plan.predicted_traffic():
            bad.append(f"{dict(plan.traffic.bytes)} but predicted {plan.predicted_traffic()}")
        wrong = wrong_with(plan, results(plan, inputs, sink, -dlse), exact, largest)
        if not comm.allreduce(len(wrong)):
            bad.append("dlse of the other sign passed")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi
@pytest.mark.one_mpi
def test_plan_on_a_gpu(comm, grid_of, cupy):
    from a2d_mpi.comm.gpus import bind_gpu

    bind_gpu(comm)
    grid, bad = grid_of(*OTHERS[-1][1]), []
    for mask, dtype, nheads_kv in (CASES[2], CASES[4]):
        inputs, sink, dlse, exact, largest = problem(mask, dtype, nheads_kv)
        plan = OTHERS[-1][0](
            grid, mask, seqlen=N, nheads=NHEADS, nheads_kv=nheads_kv, headdim=D, dtype=dtype,
        )  # fmt: skip
        found = results(plan, inputs, sink, dlse, cupy.asarray, cupy.asnumpy)
        bad += wrong_with(plan, found, exact, largest)
        bad += ["cuDNN would compute"] * (not plan._engine.kernel.any_delta)
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
def test_bad_input(comm, grid_of, where):
    """One error on all ranks."""
    grid = grid_of(1, comm.size)
    here = where == "all" or comm.rank == comm.size - 1
    plan = Attention2D(grid, Full(), seqlen=40, nheads=4, headdim=8)
    x = np.ones((len(plan.tokens), 4, 8), np.float32)
    dlse = np.zeros(x.shape[:2], np.float32)
    results = plan.forward(x, x, x)
    for wrong, text in (
        (dlse[:, :3], ", 3) and dtype float32, this shard needs"),
        (dlse.astype(float), "and dtype float64, this shard needs"),
        (dlse.tolist(), "dlse "),
        *[(None, "ranks disagree on dlse: given on some, not on others")]
        * (comm.size > 1 and where == "last"),
    ):
        given = wrong if here else dlse
        found = message_of(
            comm, lambda given=given: plan.backward(x, x, x, x, *results, dlse=given)
        )
        assert_all(comm, text in found, found)
    checking = Attention2D(grid, NOBODY, seqlen=40, nheads=4, headdim=8, check_finite=True)
    x = np.ones((len(checking.tokens), 4, 8), np.float32)
    results = checking.forward(x, x, x)
    dlse = np.where(np.isneginf(results[1]), np.float32(np.nan), 0)  # ignored
    checking.backward(x, x, x, x, *results, dlse=dlse)
    assert_all(comm, checking._engine.kernel.careful is False, "a careful kernel is slower")
    wrong = dlse * 0 + np.float32(np.inf) if here else dlse
    found = message_of(comm, lambda: checking.backward(x, x, x, x, *results, dlse=wrong))
    assert_all(comm, "dlse: NaN or infinite elements (check_finite)" in found, found)
    x = np.ones((len(plan.tokens), 4, 8), np.float32)
    results, dlse = plan.forward(x, x, x), np.zeros(x.shape[:2], np.float32)
    dq, *_ = plan.backward(x, x, x, x, *results, dlse=dlse)  # the plan still works
    assert_all(comm, np.isfinite(dq).all(), "wrong")
