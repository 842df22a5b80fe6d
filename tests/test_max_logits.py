"""The largest visible logit of each head, over all ranks."""

import numpy as np
import pytest
from cases import NHEADS, SIZE
from helpers import assert_all, distance
from test_bad_input import assert_raises
from test_dlse import HIDDEN, N
from test_headdim_v import PLANS

from a2d_mpi import Attention2D, Causal, Full, IntervalMask, TriangleAttention
from a2d_mpi.core.dtypes import DTYPES

pytestmark = [pytest.mark.mpi, pytest.mark.grids]
D = 16
NOTHING = IntervalMask(np.zeros(N, int), np.zeros(N, int))
# Mask, dtype, KV heads, size of q, soft-cap: exponentials with and without a shift.
CASES = (
    (Causal(), "float32", NHEADS, 1.0, None), (HIDDEN, "float64", 1, 300.0, None),
    (HIDDEN, "bfloat16", 2, 1.0, 2.0), (Causal(), "float32", 2, 300.0, 50.0),
    (NOTHING, "float32", NHEADS, 1.0, None),
)  # fmt: skip


def inputs(nheads_kv, dtype, size):
    """Return q, k, v whose largest products are with late keys, which a causal mask hides."""
    rng = np.random.default_rng(nheads_kv)
    q, k, v = (rng.standard_normal((N, h, D)) for h in (NHEADS, nheads_kv, nheads_kv))
    k *= 1 + np.arange(N)[:, None, None] / 10
    return [x.astype(DTYPES[dtype]) for x in (size * q, k, v)]


def exact(q, k, visible):
    """Compute the largest logits in float64, (nheads,)."""
    q, k = q.astype(float), np.repeat(k.astype(float), NHEADS // k.shape[1], axis=1)
    logits = np.einsum("qhd,khd->hqk", q, k) * D**-0.5
    return np.where(visible, logits, -np.inf).max(axis=(1, 2))


@pytest.mark.parametrize("name", PLANS)
def test_plans(comm, grid_of, name):
    kind, shape, of_grid, options = PLANS[name]
    grid, bad = grid_of(*shape, **of_grid), []
    for mask, dtype, nheads_kv, size, cap in CASES:
        if kind is TriangleAttention and not isinstance(mask, Causal):
            continue
        q, k, v = inputs(nheads_kv, dtype, size)
        visible = mask.dense(np.arange(N), np.arange(N))
        right, wrong = exact(q, k, visible), exact(q, k, np.ones_like(visible))
        plan = kind(
            grid, mask, seqlen=N, nheads=NHEADS, nheads_kv=nheads_kv, headdim=D, dtype=dtype,
            logit_softcap=cap, **options,
        )  # fmt: skip
        mine = [x[plan.tokens] for x in (q, k, v)]
        *results, found = plan.forward(*mine, max_logits=True)
        largest = 1e-15 if dtype == "float64" else 1e-6
        largest *= 10 * np.abs(wrong).max()
        if not distance(found, right) <= largest or distance(found, wrong) <= largest:
            bad.append(f"{dtype}: {found}, must be {right}")
        if found.dtype != plan.compute_dtype or found.shape != (NHEADS,):
            bad.append(f"{found.dtype} {found.shape}")
        if len({x.tobytes() for x in comm.allgather(found)}) > 1:
            bad.append("ranks differ")
        usual = plan.forward(*mine)
        if len(usual) != 2 or any(x.tobytes() != y.tobytes() for x, y in zip(results, usual)):
            bad.append("other results")
    assert_all(comm, not bad, "; ".join(bad))


def test_nan(comm, grid_of):
    """All ranks get inf for a head with NaN, and numbers for other heads."""
    grid = grid_of(1, comm.size)
    plan = Attention2D(grid, Full(), seqlen=N, nheads=NHEADS, headdim=D)
    q, k, v = inputs(NHEADS, "float32", 1.0)
    right = exact(q, k, np.ones((N, N), bool))
    q[N // 2, 1] = np.nan
    *_, found = plan.forward(*(x[plan.tokens] for x in (q, k, v)), max_logits=True)
    ok = np.isposinf(found[1]) and distance(np.delete(found, 1), np.delete(right, 1)) < 1e-4
    assert_all(comm, ok, found)


def test_refusals(comm, grid_of, cupy):
    from a2d_mpi.comm.gpus import bind_gpu

    bind_gpu(comm)
    grid = grid_of(1, comm.size)
    plan = Attention2D(grid, Full(), seqlen=N, nheads=NHEADS, headdim=D)
    given = [x[plan.tokens] for x in inputs(NHEADS, "float32", 1.0)]
    on_gpu = [cupy.asarray(x) for x in given]
    told = "kernel 'cupy' gives no max_logits, 'numpy' does"
    assert_raises(comm, told, plan.forward, *on_gpu, max_logits=True)
    if SIZE > 1:
        wanted = comm.rank == comm.size - 1
        told = "ranks disagree on max_logits: some ranks pass it, others do not"
        assert_raises(comm, told, plan.forward, *given, max_logits=wanted)
    plan.forward(*given)  # the plan still works
