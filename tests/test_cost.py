"""The closed forms themselves, against the design's formulas for equal parts."""

import subprocess
import sys

import pytest

from a2d_mpi import cost

N, H, HKV, D = 24, 6, 2, 16


def problem(ranks):
    return cost.Problem((N,) * ranks, H, HKV, D, itemsize=4, compute_itemsize=4)


@pytest.mark.parametrize("rows, cols", [(1, 1), (1, 4), (4, 1), (2, 3), (8, 8)])
def test_equal_parts(rows, cols):
    r, c = rows, cols
    forward = (c - 1) * N * H * D + 2 * (r - 1) * N * HKV * D + (c - 1) * N * H * (D + 1)
    backward = (
        2 * (c - 1) * N * H * D
        + 2 * (c - 1) * N * H
        + 2 * (r - 1) * N * HKV * D
        + (c - 1) * N * H * D
        + 2 * (r - 1) * N * HKV * D
    )
    for rank in range(rows * cols):
        moved = cost.traffic_2d(problem(rows * cols), rows, cols, rank)
        for direction in (0, 1):
            for phase, elements in (("forward", forward), ("backward", backward)):
                total = sum(x[direction] for key, x in moved.items() if key[0] == phase)
                assert total == 4 * elements


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_ring_of_equal_parts(ranks):
    for rank in range(ranks):
        moved = cost.traffic_ring(problem(ranks), rank)
        if ranks == 1:
            assert moved == {}
            continue
        assert moved["forward", "ring"] == [4 * 2 * (ranks - 1) * N * HKV * D] * 2
        assert moved["backward", "ring"] == [4 * 2 * (2 * ranks - 1) * N * HKV * D] * 2


@pytest.mark.parametrize("outer, inner", [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (8, 8)])
def test_double_ring_of_equal_parts(outer, inner):
    """Forward as much as a ring; backward each round's dK and dV hop home, and then outwards."""
    ranks, block = outer * inner, 4 * 2 * N * HKV * D
    blocks = {
        ("forward", "inner"): outer * (inner - 1),
        ("forward", "outer"): outer - 1,
        ("backward", "inner"): outer * (2 * inner - 1) * (inner > 1),
        ("backward", "outer"): (2 * outer - 1) * (outer > 1),
    }
    expected = {key: [n * block] * 2 for key, n in blocks.items() if n}
    for rank in range(ranks):
        moved = cost.traffic_double_ring(problem(ranks), outer, inner, rank)
        assert moved == expected
        ring = cost.traffic_ring(problem(ranks), rank).get(("forward", "ring"), [0, 0])
        forward = [x for key, x in moved.items() if key[0] == "forward"]
        assert [sum(x[i] for x in forward) for i in (0, 1)] == ring


def test_uneven_parts_lose_nothing():
    """What all ranks send is what all ranks receive."""
    sizes = cost.Problem((3, 0, 5, 2, 9, 1), H, HKV, D, 8, 8)
    for moved in (
        [cost.traffic_2d(sizes, 2, 3, rank) for rank in range(6)],
        [cost.traffic_ring(sizes, rank) for rank in range(6)],
        *(
            [cost.traffic_double_ring(sizes, 6 // n, n, rank) for rank in range(6)]
            for n in (1, 2, 3)
        ),
    ):
        for key in {key for rank in moved for key in rank}:
            sent, received = map(sum, zip(*(rank.get(key, (0, 0)) for rank in moved)))
            assert sent == received > 0


def test_flops():
    assert cost.flops(10, H, D) == 4 * 10 * H * D
    assert cost.flops(10, H, D, backward=True) == 10 * 10 * H * D


def test_these_need_no_mpi():
    code = """
import sys
sys.modules["mpi4py"] = None  # importing it fails
import a2d_mpi
from a2d_mpi import Causal, Distribution, Full, IntervalMask, atomic, cost, merge, reference
from a2d_mpi import results, tiles
try:
    a2d_mpi.Attention2D
except ImportError:
    print("as it must")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "as it must\n", done.stderr
