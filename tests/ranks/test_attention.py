"""The distributed algorithms against float64, on every grid that the ranks of this run make."""

import time
from dataclasses import replace
from functools import partial
from itertools import permutations, product

import numpy as np
import pytest
from cases import (
    METHODS,
    NHEADS,
    OTHERS,
    SEQLENS,
    SIZE,
    TENSORS,
    UNITS,
    checked,
    checked_both_ways,
    failures,
    inputs,
    label,
    run,
    shards,
)
from helpers import ROOT, assert_all, deeper

from a2d_mpi import Attention2D, Causal, Full, IntervalMask, ProcessGrid
from a2d_mpi.experiments.check import check_attention
from a2d_mpi.planning.planner import best_candidate, best_layout
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import attention2d
from a2d_mpi.schedules.problem import Workload
from a2d_mpi.sharding import distribution as distributions

PROFILES = ROOT / "data" / "machines"

pytestmark = pytest.mark.mpi
one_mpi = pytest.mark.one_mpi
# On four ranks all that does not depend on their number: float32, whose bounds are the wider ones,
# few tokens in 16 bits, all distributions.
ALL = SIZE == 4
# The triangle's is for its own numbers of ranks: see test_triangle.
DISTRIBUTIONS = [x for x in distributions.FORMULAS if x != "triangle"]
SHARED_OUT = {1: ["zigzag"], 5: ["contiguous"], 6: ["zigzag", "striped"]}.get(SIZE, DISTRIBUTIONS)
LARGE = 1009


@pytest.fixture(scope="module", params=METHODS, ids=label)
def method(request, comm):
    algorithm, shape = request.param
    grid = ProcessGrid(comm, *shape)
    yield lambda mask, **kwargs: algorithm(grid, mask, **kwargs)
    grid.free()


# Dtype, distribution, tokens.
CASES = [
    *product(["float32", "float64"] if ALL else ["float64"], SHARED_OUT, SEQLENS),
    *product(["float16", "bfloat16"], [None], [1, 64, LARGE] if ALL else [LARGE]),
]
FIRST = ("float64", "zigzag", 3), ("float64", "zigzag", LARGE), ("bfloat16", None, LARGE)


@pytest.mark.parametrize("case", deeper(CASES, FIRST), ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
def test_results_and_traffic(comm, method, mask, case):
    """The error of 16-bit tensors is at most twice that of float32 rounded at the end."""
    (dtype, distribution, seqlen), bad = case, []
    for nheads_kv, headdim in ((1, 7), (1, 64), (NHEADS, 32)):
        sizes = {"seqlen": seqlen, "nheads": NHEADS, "nheads_kv": nheads_kv, "headdim": headdim}
        bad += checked(method(mask, **sizes, dtype=dtype, distribution=distribution))[1]
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.parametrize("algorithm", OTHERS, ids=label)
@pytest.mark.parametrize("seqlen", [3, 101])
@pytest.mark.parametrize("distribution", deeper(SHARED_OUT, ["zigzag"]))
def test_other_methods_and_head_axes(comm, grid_of, algorithm, distribution, seqlen):
    """Every method is right with both masks, shared KV heads and 16 bits, and without overlap."""
    grid, bad = grid_of(*algorithm[1]), []
    for mask, nheads_kv, dtype in (
        (Full(), NHEADS, "float32"),
        (Causal(), 1, "float64"),
        (Causal(), NHEADS, "bfloat16"),
        (Causal(), 1, "float16"),
    ):
        plan = partial(
            algorithm[0],
            grid,
            mask,
            seqlen=seqlen,
            nheads=NHEADS,
            nheads_kv=nheads_kv,
            headdim=16,
            dtype=dtype,
            distribution=distribution,
        )
        bad += checked_both_ways(plan)
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.parametrize("shape", deeper(UNITS, UNITS[-1:]), ids=str)
def test_chunks_in_units(comm, grid_of, monkeypatch, shape):
    """Long chunks are cut; results are right, counted, and the same without overlap."""
    monkeypatch.setattr(attention2d, "GRAIN", 4)
    grid, bad = grid_of(*shape), []
    cut = [
        max(len(attention2d.chunked(((0, 101 // comm.size * grid.heads),), x)) for x in shape[:2])
    ]
    window = IntervalMask(np.maximum(np.arange(101) - 30, 0), np.arange(101) + 1)
    for (mask, nheads_kv), distribution in product(
        ((Full(), NHEADS), (Causal(), 1), (window, NHEADS)), SHARED_OUT
    ):
        plan = partial(
            Attention2D,
            grid,
            mask,
            seqlen=101,
            nheads=NHEADS,
            nheads_kv=nheads_kv,
            headdim=16,
            distribution=distribution,
        )
        bad += checked_both_ways(plan)
    if 2 in shape[:2] and cut != [2]:
        bad.append("nothing was cut")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.parametrize(
    "what", ["again", "in turn", "late rank", "strided", "split messages", "split, in turn"]
)
@pytest.mark.parametrize("distribution", deeper([*DISTRIBUTIONS, "balanced"], ["zigzag"]))
def test_the_same_bits(comm, method, distribution, what, monkeypatch):
    """What the order of events, of memory and of messages is does not change a bit."""
    sizes = {"seqlen": 301, "nheads": NHEADS, "headdim": 16, "distribution": distribution}
    whole, plan = inputs(301, NHEADS, 16), method(Causal(), **sizes)
    first = run(plan, *whole)
    if "split" in what:
        monkeypatch.setattr("a2d_mpi.comm.transport.Transport.limit", 1000)
    if "turn" in what or "split" in what:
        plan.free()
        plan = method(Causal(), **sizes, overlap="turn" not in what)
    time.sleep(0.3 * (what == "late rank" and comm.rank == comm.size - 1))
    found = run(plan, *whole, np.asfortranarray if what == "strided" else np.asarray)
    bad = [f"{x} differs" for x in TENSORS if found[x].tobytes() != first[x].tobytes()]
    if "split" in what:
        bad += ["traffic"] * (plan.traffic.bytes != plan.predicted_traffic())
        sent = sum(n for n, _ in plan.traffic.bytes.values())
        split = sum(n for n, _ in plan.traffic.messages.values()) >= sent / 1000
        bad += ["messages are not split"] * (not split)
    assert_all(comm, not bad, "; ".join(bad))


def test_timings_add_up(comm, method):
    plan = method(Causal(), seqlen=300, nheads=NHEADS, headdim=16)
    run(plan, *inputs(300, NHEADS, 16))
    bad = []
    for phase in ("forward", "backward"):
        parts = [plan.timings[f"{phase}/{part}"] for part in ("compute", "merge", "wait")]
        if not (min(parts) >= 0 and 0 < sum(parts) <= plan.timings[f"{phase}/total"]):
            bad.append(f"{phase}: {plan.timings}")
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.multirank
@pytest.mark.parametrize("order", deeper(map("".join, permutations("rcu")), ["ruc", "cur"]))
def test_order_of_ranks(comm, grid_of, order):
    """The order of ranks does not change results, bytes or messages."""
    heads = 2 if comm.size % 2 == 0 else 1
    rows = 2 if comm.size // heads % 2 == 0 else 1
    sizes = {"r": rows, "c": comm.size // heads // rows, "u": heads}
    grid = grid_of(*sizes.values(), order)
    mine = {"r": grid.row, "c": grid.col, "u": grid.head}
    bad = []
    # The last axis of the order varies fastest among the caller's ranks.
    if comm.rank != np.ravel_multi_index([mine[x] for x in order], [sizes[x] for x in order]):
        bad.append(f"{mine} on rank {comm.rank}")
    logical = (grid.row * grid.cols + grid.col) * grid.heads + grid.head
    if grid.comm.rank != logical or grid.group_comm.rank != logical // grid.heads:
        bad.append(f"rank {grid.comm.rank} of {grid.comm.size} is {mine}")
    plan = Attention2D(grid, Causal(), seqlen=90, nheads=NHEADS, headdim=8)
    bad += failures(plan, run(plan, *inputs(90, NHEADS, 8)), Causal(), 90, NHEADS, 8)
    assert_all(comm, not bad, "; ".join(bad))
    plan.free()


def test_planned_grid(comm):
    machine = read_machine(PROFILES / "h100-64x1.toml")
    work = Workload(1 << 16, NHEADS, 64, mask=Causal())
    grid = ProcessGrid.from_layout(comm, best_layout(machine, comm.size, work))
    best = best_candidate(machine, comm.size, work, methods=("attention2d",))
    found = replace(grid.layout, nodes=None)  # which the method does not know
    assert_all(comm, found == best.layout, f"{found}, planned {best.layout}")
    grid.free()
    with pytest.raises(ValueError, match="no plan fits"):
        best_layout(machine, comm.size, work, memory=1000)


@one_mpi
def test_areas_add_up(comm, method):
    plan = method(Causal(), seqlen=77, nheads=NHEADS, headdim=16, distribution="striped")
    total = comm.allreduce(plan.area())
    everyone = sum(plan.area(rank) for rank in range(comm.size))
    # Every layer covers the whole mask, for its heads.
    assert_all(comm, total == everyone == plan.grid.heads * 77 * 78 // 2, f"{total}, {everyone}")


@one_mpi
@pytest.mark.parametrize("rows", [None, 5])
def test_check_agrees_with_the_reference(comm, method, rows):
    """The distributed check passes right results and finds wrong ones, tensor by tensor."""
    plan = method(Causal(), seqlen=130, nheads=NHEADS, nheads_kv=1, headdim=16)
    whole = inputs(130, 1, 16)
    local = shards(plan, whole) | run(plan, *whole)
    checks = check_attention(plan, local, rows)
    bad = [f"{name}: {c}" for name, c in checks.items() if not c.passed]
    bad += [] if set(checks) == set(TENSORS) else [str(set(checks))]
    if rows is None:
        bad += [f"{name} counts {c.rows}" for name, c in checks.items() if c.rows != 130]
    for name in TENSORS:
        # The last token is in every sample.  Its owner gets it wrong.
        wrong = dict(local)
        wrong[name] = local[name].copy()
        if plan.tokens[-1:] == [129]:
            wrong[name][-1, 0] += 1e-3 * np.abs(local[name]).max()
        told = check_attention(plan, wrong, rows)
        # What else may fail: the gradients of a sample are checked with the run's own out and lse.
        if told[name].passed:
            bad.append(f"a wrong {name} passed: {told[name]}")
    nan = {**local, "out": local["out"] * np.nan}
    if check_attention(plan, nan, rows)["out"].passed:
        bad.append("NaN passed")
    assert_all(comm, not bad, "; ".join(bad))


@one_mpi
def test_the_tests_can_tell(comm, method, monkeypatch):
    """Wrong variants fail: a merge that averages, and a mask that is off by one."""
    plan = method(Causal(), seqlen=130, nheads=NHEADS, headdim=16)
    if plan.grid.group_comm.size > 1:
        monkeypatch.setattr("a2d_mpi.devices.host.merge", averaging_merge)
        bad = failures(plan, run(plan, *inputs(130, NHEADS, 16)), Causal(), 130, NHEADS, 16)
        assert_all(comm, comm.allreduce(len(bad)) > 0, "an averaging merge passed")
        monkeypatch.undo()
    tokens = np.arange(130)
    plan = method(IntervalMask(tokens * 0, tokens + 2), seqlen=130, nheads=NHEADS, headdim=16)
    bad = failures(plan, run(plan, *inputs(130, NHEADS, 16)), Causal(), 130, NHEADS, 16)
    assert_all(comm, bool(bad) or not len(plan.tokens), "a mask off by one passed")


def averaging_merge(out, lse, rest, out2, lse2):
    out[...] = (out + out2) / 2
    lse[...] = np.logaddexp(lse, lse2)
