"""The reference itself: against a direct softmax, and its gradients against differences."""

import numpy as np
import pytest

from a2d_mpi.core import reference
from a2d_mpi.masks.mask import Causal, Full, IntervalMask

SCALE = 0.7


def problem(nq=5, nk=6, nheads=4, nheads_kv=2, d=3):
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((nq, nheads, d)) for _ in range(2))
    k, v = (rng.standard_normal((nk, nheads_kv, d)) for _ in range(2))
    return q, k, v, dout


@pytest.mark.parametrize(
    "mask", [Full(), Causal(), IntervalMask(np.array([0, 2, 4, 1, 3]), np.array([2, 6, 4, 3, 9]))]
)
def test_reference(mask):
    q, k, v, dout = problem()
    visible = mask.dense(np.arange(5), np.arange(6))
    out, lse = reference.attention(q, k, v, visible, SCALE)
    for h in range(4):
        for i in range(5):
            s = np.exp([SCALE * q[i, h] @ k[j, h // 2] for j in np.flatnonzero(visible[i])])
            expected = s @ v[visible[i], h // 2] / s.sum() if len(s) else np.zeros(3)
            assert out[i, h] == pytest.approx(expected, abs=1e-14)
            assert lse[i, h] == (pytest.approx(np.log(s.sum())) if len(s) else -np.inf)

    delta = (dout * out).sum(-1)
    gradients = reference.attention_backward(dout, q, k, v, lse, delta, visible, SCALE)
    for x, gradient in zip((q, k, v), gradients):
        numeric, step = np.zeros_like(x), 1e-6
        for index in np.ndindex(x.shape):
            value, both = x[index], []
            for sign in (1, -1):
                x[index] = value + sign * step
                both.append((reference.attention(q, k, v, visible, SCALE)[0] * dout).sum())
            x[index] = value
            numeric[index] = (both[0] - both[1]) / (2 * step)
        assert gradient == pytest.approx(numeric, abs=1e-8)


def test_parts_add_up():
    q, k, v, dout = problem()
    visible = Causal().dense(np.arange(5), np.arange(6))
    out, lse = reference.attention(q, k, v, visible, SCALE)
    delta = (dout * out).sum(-1)
    whole = reference.attention_backward(dout, q, k, v, lse, delta, visible, SCALE)
    halves = [
        reference.attention_backward(dout, q, k[s], v[s], lse, delta, visible[:, s], SCALE)
        for s in (slice(0, 2), slice(2, 6))
    ]
    assert halves[0][0] + halves[1][0] == pytest.approx(whole[0])
    assert np.concatenate([halves[0][1], halves[1][1]]) == pytest.approx(whole[1])
