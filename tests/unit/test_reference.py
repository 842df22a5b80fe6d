"""The reference itself: against a direct softmax, and its gradients against differences."""

import numpy as np
import pytest
from dense import plain, slopes
from helpers import distance

from a2d_mpi import Causal, Full, IntervalMask
from a2d_mpi.core import reference

SCALE = 0.7


def problem(nq=5, nk=6, nheads=4, nheads_kv=2, d=3):
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((nq, nheads, d)) for _ in range(2))
    k, v = (rng.standard_normal((nk, nheads_kv, d)) for _ in range(2))
    return q, k, v, dout


INTERVALS = IntervalMask(np.array([0, 2, 4, 1, 3]), np.array([0, 6, 4, 3, 9]))


@pytest.mark.parametrize("mask", [Full(), Causal(), INTERVALS])
def test_reference(mask):
    q, k, v, _ = problem()
    visible = mask.dense(np.arange(5), np.arange(6))
    out, lse = reference.attention(q, k, v, visible, SCALE)
    for h in range(4):
        for i in range(5):
            s = np.exp([SCALE * q[i, h] @ k[j, h // 2] for j in np.flatnonzero(visible[i])])
            expected = s @ v[visible[i], h // 2] / s.sum() if len(s) else np.zeros(3)
            assert out[i, h] == pytest.approx(expected, abs=1e-14)
            assert lse[i, h] == (pytest.approx(np.log(s.sum())) if len(s) else -np.inf)


@pytest.mark.parametrize("mask, cap, sinks, with_dlse", [
    (Full(), None, False, False), (Causal(), None, False, False), (INTERVALS, None, False, False),
    (INTERVALS, 0.8, False, False), (INTERVALS, None, True, False), (INTERVALS, 1.5, True, False),
    (INTERVALS, 1.5, False, True), (INTERVALS, 1.5, True, True),
])  # fmt: skip
def test_gradients(mask, cap, sinks, with_dlse):
    """Of a loss in out, and perhaps in lse, with a soft-cap and a sink."""
    q, k, v, dout = inputs = problem()
    rng, visible = np.random.default_rng(1), mask.dense(np.arange(5), np.arange(6))
    sink = rng.standard_normal(4) if sinks else None
    dlse = rng.standard_normal((5, 4)) if with_dlse else None

    def loss():
        found = plain(inputs, visible, SCALE, cap, sink)
        lse = np.where(np.isneginf(found["lse"]), 0, found["lse"])
        return (found["out"] * dout).sum() + (0 if dlse is None else (lse * dlse).sum())

    exact = plain(inputs, visible, SCALE, cap, sink, dlse=dlse)
    without = plain(inputs, visible, SCALE, cap, sink)
    for name, x in zip(("dq", "dk", "dv", "dsink"), (q, k, v, sink)):
        if x is not None:
            numeric = slopes(loss, x)
            assert exact[name] == pytest.approx(numeric, abs=1e-8), name
            assert not with_dlse or name == "dv" or distance(numeric, without[name]) > 1e-3
    if sinks:  # the first query sees nothing else
        assert (exact["out"][0] == 0).all() and (exact["lse"][0] == sink).all()
