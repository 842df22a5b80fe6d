"""The triangle partition: results, bytes, balance and refusals."""

from functools import partial

import numpy as np
import pytest
from cases import NHEADS, SIZE, checked_both_ways, expected, failures, inputs, run
from helpers import DEEPER, SAMPLE, assert_all, drive
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from a2d_mpi import Causal, Full, ProcessGrid, TriangleAttention
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning import cost
from a2d_mpi.planning.accounts import area
from a2d_mpi.schedules import problem_of, write
from a2d_mpi.schedules.problem import Workload
from a2d_mpi.schedules.program import Program

# Ranks that take part, and those among them that share the heads.
SHAPES = {1: [(1, 1)], 4: [(3, 1)], 5: [(3, 1)], 6: [(6, 1), (6, 2), (6, 6)]}.get(SIZE, [])


@pytest.fixture(scope="module", params=SHAPES, ids=lambda x: f"{x[0]} ranks, {x[1]} share heads")
def grid(comm, request):
    """Return a grid of some of the ranks; None on other ranks."""
    ranks, heads = request.param
    part = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED)
    grid = ProcessGrid(part, ranks // heads, 1, heads) if part != MPI.COMM_NULL else None
    yield grid
    if grid is not None:
        grid.free()
        part.Free()


def reference(seqlen, nheads_kv, dtype="float32"):
    """Compute float64 results on all ranks, also on idle ones."""
    expected(Causal(), AttentionConfig(seqlen, NHEADS, 16, nheads_kv, dtype=dtype), 1.0)


@pytest.mark.mpi
@pytest.mark.parametrize("seqlen, nheads_kv, dtype", [
    (61, 6, "float32"), (3, 1, "float32"), (301, 6, "bfloat16"),
    *(pytest.param(*x, marks=DEEPER) for x in (
        (1009, 2, "float32"), (1, 6, "float32"), (301, 6, "float64"), (301, 6, "float16"),
    )),
])  # fmt: skip
def test_results_bytes_buffers(comm, grid, seqlen, nheads_kv, dtype):
    sizes = {"seqlen": seqlen, "nheads": NHEADS, "nheads_kv": nheads_kv, "headdim": 16}
    reference(seqlen, nheads_kv, dtype)
    bad = []
    if grid is not None:
        make = partial(TriangleAttention, grid, Causal(), dtype=dtype, **sizes)
        bad = checked_both_ways(make)
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.mpi(min_size=4)
@pytest.mark.multirank
@pytest.mark.one_mpi
def test_a_wrong_variant_fails(comm, grid, monkeypatch):
    """The test fails if partial results of other ranks are not added."""
    reference(61, NHEADS)
    found = []
    if grid is not None and grid.group_comm.size > 1:
        monkeypatch.setattr(Program, "combine", lambda p, source, target: p.clear(source))
        plan = TriangleAttention(grid, Causal(), seqlen=61, nheads=NHEADS, headdim=16)
        found = failures(plan, run(plan, *inputs(61, NHEADS, 16)), Causal(), 61, NHEADS, 16)
    seen = comm.allreduce(len(found))
    alone = comm.allreduce(grid is not None and grid.group_comm.size == 1)
    assert_all(comm, seen > 0 or alone > 0, "nothing was found")


@pytest.mark.mpi(min_size=4)
@pytest.mark.multirank
@pytest.mark.one_mpi
def test_refusals(comm):
    sizes = {"seqlen": 61, "nheads": NHEADS, "headdim": 16}
    for ranks, mask, options, text in (
        (3, Full(), {}, "a triangle needs a causal mask, got Full"),
        (4, Causal(), {}, "ranks (times the ranks that share the heads): such as 3 or 6, got 4"),
        (3, Causal(), {"distribution": "zigzag"}, "needs the triangle distribution, got zigzag"),
    ):
        part, said = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED), ""
        if part != MPI.COMM_NULL:
            grid = ProcessGrid(part, ranks, 1)
            try:
                TriangleAttention(grid, mask, **sizes, **options)
            except ValueError as error:
                said = str(error)
            grid.free()
            part.Free()
        assert_all(comm, part == MPI.COMM_NULL or text in said, said)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks, heads", [(10, 1), (12, 2)])
def test_on_more_ranks(tmp_path, ranks, heads):
    done = drive(
        "attention.py", ranks, SAMPLE, "--method", "triangle", "--head-ranks", heads,
        "--seqlen", 301, "--backward", "--check", "full", "--trials", 2,
        "--output", tmp_path / "out.h5",
    )  # fmt: skip
    assert "FAILED" not in done.stdout, done.stdout + done.stderr


def busiest(method, layout, work, distribution):
    """Return bytes of the mean and the busiest rank in the first phase of a workload.

    In units of a token's q.
    """
    problem = problem_of(method, layout, work, work.mask, distribution)
    found = []
    for rank in range(layout.size):
        traffic = cost.traffic(method, layout, problem, rank).items()
        moved = [both for (phase, _), both in traffic if phase == work.phases[0]]
        found.append(np.sum(moved, axis=0))
    return np.mean(found, axis=0)[1] / work.nbytes("q"), np.max(found) / work.nbytes("q")


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


@pytest.mark.parametrize(
    "t, share", [(4, 0.83), (5, 0.65), (6, 0.75), (8, 0.72)]
)  # 6, 10, 15, 28 ranks; 0.72 with 66, too, which takes long
def test_the_largest_rank_moves_less_than_in_the_best_grid(t, share):
    ranks = t * (t - 1) // 2
    work = Workload(2 * t * (t - 1) * ranks, 2, 64, mask=Causal(), dtype="float32")
    grids = [
        busiest("attention2d", Layout(r, ranks // r), work, "zigzag")[1]
        for r in range(1, ranks + 1)
        if ranks % r == 0
    ]
    largest = busiest("triangle", Layout(ranks, 1), work, "triangle")[1]
    assert largest / min(grids) == pytest.approx(share, abs=0.01)


@given(st.integers(3, 8), st.integers(1, 3000))
@settings(max_examples=15, deadline=None)
def test_balance(t, seqlen):
    layout = Layout(t * (t - 1) // 2, 1)
    work = Workload(seqlen, 1, 1, mask=Causal(), dtype="float32")
    problem = problem_of("triangle", layout, work, work.mask)
    areas = [
        area(program)
        for rank in range(layout.size)
        for program in write("triangle", "forward", layout, problem, rank)
    ]
    assert sum(areas) == seqlen * (seqlen + 1) // 2
    assert max(areas) / np.mean(areas) <= 1 + 3 * layout.size / seqlen
