"""Plans with a logit soft-cap and an attention sink, against float64."""

import numpy as np
import pytest
from cases import NHEADS, OTHERS, SIZE, label
from dense import problem, wrong_with
from helpers import DEEPER, assert_all
from test_bad_input import assert_raises
from test_dlse import CASES, HIDDEN, D, N

from a2d_mpi import Attention2D, Causal, Full, NodeAwareAttention, RingAttention
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.experiments.check import check_attention

pytestmark = [pytest.mark.mpi, pytest.mark.grids]

ONE = {1: (1, 1), 4: (2, 2), 5: (1, 5), 6: (2, 3)}.get(SIZE, (1, SIZE))
PLANS = [(Attention2D, ONE), (RingAttention, (1, SIZE)), OTHERS[-1]]
PLANS += [(NodeAwareAttention, (1, SIZE))] * (SIZE == 4)


def sizes(nheads_kv=NHEADS, **others):
    return {"seqlen": N, "nheads": NHEADS, "nheads_kv": nheads_kv, "headdim": D, **others}


@pytest.mark.parametrize("method", PLANS, ids=label)
@pytest.mark.parametrize("cap, sinks", [
    (2.0, True), *(pytest.param(*x, marks=DEEPER) for x in ((2.0, False), (None, True))),
])  # fmt: skip
def test_plans(comm, grid_of, method, cap, sinks):
    grid, bad = grid_of(*method[1]), []
    for mask, dtype, nheads_kv in CASES:
        plan = method[0](grid, mask, **sizes(nheads_kv, dtype=dtype, logit_softcap=cap))
        bad += wrong_with(plan, problem(mask, plan.config, sinks))
        if plan.traffic.bytes != plan.predicted_traffic():
            bad.append(f"{dict(plan.traffic.bytes)} but predicted {plan.predicted_traffic()}")
    assert_all(comm, not bad, "; ".join(bad))


def test_out_in_16_bits_is_rounded_once(comm, grid_of):
    """Equal keys: out is their value times a number that float32 knows to the last digit."""
    grids = [ONE] + [(1, 1, SIZE)] * (NHEADS % SIZE == 0) + [(2, 1, 2)] * (SIZE == 4)
    v = np.linspace(1, 2, N * NHEADS * D).reshape(N, NHEADS, D).astype(DTYPES["bfloat16"])
    v[:] = v[:1]
    zeros, sink = np.zeros_like(v), np.linspace(2, 3, NHEADS).astype(np.float32)
    share = (N / (N + np.exp(sink.astype(float))))[:, None]
    exact = (v[0].astype(float) * share).astype(np.float32).astype(DTYPES["bfloat16"])
    bad = []
    for shape in grids:
        grid = grid_of(*shape)
        plan = Attention2D(grid, Full(), **sizes(dtype="bfloat16"))
        mine = [x[plan.tokens] for x in (zeros, zeros, v)]
        # Partial outs of other ranks are rounded on the wire; those of one value are exact.
        out, _ = plan.forward(*mine, sink)
        off = (out.astype(float) != exact.astype(float)).mean() if len(out) else 0
        # float32 products and sums may move a value across the middle of two neighbours.
        if off > 0.02:
            bad.append(f"{shape}: {100 * off:.1f} % are not rounded as the exact ones")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.parametrize("change", ["nothing", "sink", "cap", "dsink of one rank"])
def test_check_of_a_run(comm, grid_of, change):
    """`check_attention` passes right results and nothing else."""
    plan = Attention2D(grid_of(*ONE), Causal(), **sizes(logit_softcap=3.0))
    inputs, sink, *_ = problem(Causal(), plan.config, sinks=True)
    q, k, v, dout = (x[plan.tokens].astype(np.float32) for x in inputs)
    out, lse = plan.forward(q, k, v, sink)
    dq, dk, dv, dsink = plan.backward(dout, q, k, v, out, lse, sink)
    local = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "sink": sink}
    local |= {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
    if change == "sink":
        local["sink"] = sink + np.float32(1e-3)
    elif change == "cap":
        plan.logit_softcap = 3.01
    elif change == "dsink of one rank" and comm.rank == 0:
        local["dsink"] = dsink * np.float32(1.001)
    for rows in (None, 8):
        checks = check_attention(plan, local, rows)
        failed = {x for x, y in checks.items() if not y.passed}
        expected = {
            "nothing": set(), "sink": {"out", "lse", "dsink"}, "cap": {"out", "lse"},
            "dsink of one rank": {"dsink"},
        }[change]  # fmt: skip
        ok = failed >= expected and (failed == expected or change in ("sink", "cap"))
        assert_all(comm, ok, f"{rows} rows: {failed} failed")


@pytest.mark.one_mpi
def test_plan_on_a_gpu(comm, grid_of, cupy):
    from a2d_mpi.comm.gpus import bind_gpu

    bind_gpu(comm)
    grid, bad = grid_of(*OTHERS[-1][1]), []
    for dtype in ("float32", "bfloat16"):
        plan = OTHERS[-1][0](grid, HIDDEN, **sizes(2, dtype=dtype, logit_softcap=2.0))
        given = problem(HIDDEN, plan.config, sinks=True)
        bad += wrong_with(plan, given, None, cupy.asarray, cupy.asnumpy)
    assert_all(comm, not bad, "; ".join(bad))


GOOD = {"seqlen": 40, "nheads": 4, "headdim": 8}


@pytest.mark.parametrize("where", ["all", "last"])
def test_bad_input(comm, grid_of, where):
    """A bad sink is one error on all ranks."""
    grid = grid_of(1, comm.size)
    here = where == "all" or comm.rank == comm.size - 1
    for wrong, text in (
        ({"logit_softcap": 0.0}, "logit_softcap must be between 1e-30 and 1e30, got 0.0"),
        ({"logit_softcap": 1.0, "kernel": "cudnn", "dtype": "bfloat16"}, "computes no soft-cap"),
    ):
        more = wrong if here else {x: y for x, y in wrong.items() if x in ("dtype",)}
        assert_raises(comm, text, Attention2D, grid, Full(), **GOOD, **more)
    if comm.size > 1 and where == "last":
        cap = 2.0 if here else 3.0
        text = "ranks disagree on logit_softcap: 3.0 on rank 0"
        assert_raises(comm, text, Attention2D, grid, Full(), **GOOD, logit_softcap=cap)
    plan = Attention2D(grid, Full(), **GOOD)
    x, sink = np.ones((len(plan.tokens), 4, 8), np.float32), np.zeros(4, np.float32)
    for wrong, text in (
        (sink[:3], "sink has shape (3,) and dtype float32, but this plan needs (4,) and float32"),
        (sink.astype(float), "sink has shape (4,) and dtype float64"),
        ([0.0] * 4, "sink "),
    ):
        assert_raises(comm, text, plan.forward, x, x, x, wrong if here else sink)
    if comm.size > 1 and where == "last":
        given = sink if here else None
        assert_raises(comm, "ranks disagree on the sink", plan.forward, x, x, x, given)
    out, _ = plan.forward(x, x, x, sink)  # the plan still works
    assert_all(comm, np.allclose(out, 40 * np.exp(8**0.5) / (40 * np.exp(8**0.5) + 1)), "wrong")
