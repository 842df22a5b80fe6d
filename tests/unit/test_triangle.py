"""The triangle partition: bytes and balance."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a2d_mpi import Causal
from a2d_mpi.core.layout import Layout
from a2d_mpi.planning import cost
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.writing import problem_of


@pytest.mark.parametrize("t", [3, 4, 5, 6, 8, 12])
@pytest.mark.parametrize("h, hkv", [(4, 4), (4, 1)])
def test_mean_bytes(t, h, hkv):
    """The mean is 4 (T-2) / (T (T-1)) of N H D without shared KV heads."""
    ranks, d = t * (t - 1) // 2, 8
    seqlen = 2 * t * (t - 1) * 4  # all slices are equal
    work = Workload(seqlen, h, d, hkv, mask=Causal(), dtype="float32", backward=True)
    layout = Layout(ranks, 1)
    problem = problem_of("triangle", layout, work, work.mask)
    moved = [cost.traffic("triangle", layout, problem, rank) for rank in range(ranks)]
    part = seqlen * (t - 2) / (t * (t - 1)) * 4  # bytes of what each rank misses of a segment
    q, kv = h * d, 2 * hkv * d
    for phase, elements in (
        ("forward", q + kv + h * (d + 1)),
        ("backward", 2 * q + 2 * h + kv + q + kv),
    ):
        received = [sum(x[1] for key, x in rank.items() if key[0] == phase) for rank in moved]
        assert np.mean(received) == pytest.approx(part * elements, rel=1e-12)


@given(st.integers(3, 8), st.integers(1, 3000))
@settings(max_examples=15, deadline=None)
def test_balance(t, seqlen):
    layout = Layout(t * (t - 1) // 2, 1)
    work = Workload(seqlen, 1, 1, mask=Causal(), dtype="float32")
    problem = problem_of("triangle", layout, work, work.mask)
    areas = [cost.pairs("triangle", layout, problem, rank) for rank in range(layout.size)]
    assert sum(areas) == seqlen * (seqlen + 1) // 2
    assert max(areas) / np.mean(areas) <= 1 + 3 * layout.size / seqlen
