"""The distributed algorithms against float64, on every grid that the ranks of this run make."""

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


@pytest.mark.parametrize("seqlen", deeper(SEQLENS, (3, LARGE)))
@pytest.mark.parametrize(
    "dtype", deeper(["float32", "float64"] if ALL else ["float64"], ["float64"])
)
@pytest.mark.parametrize("distribution", deeper(SHARED_OUT, ["zigzag"]))
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
def test_results_and_traffic(comm, method, mask, distribution, dtype, seqlen):
    bad = []
    for nheads_kv, headdim in (1, 7), (1, 64), (NHEADS, 32):
        plan = method(
            mask,
            seqlen=seqlen,
            nheads=NHEADS,
            nheads_kv=nheads_kv,
            headdim=headdim,
            dtype=dtype,
            distribution=distribution,
        )
        bad += checked(plan)[1]
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.parametrize("seqlen", deeper([1, 64, LARGE] if ALL else [LARGE], [LARGE]))
@pytest.mark.parametrize("dtype", deeper(["float16", "bfloat16"], ["bfloat16"]))
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
def test_low_precision(comm, method, mask, dtype, seqlen):
    """The error of 16-bit tensors is at most twice that of float32 rounded at the end."""
    bad = []
    for nheads_kv in (1, NHEADS):
        plan = method(
            mask, seqlen=seqlen, nheads=NHEADS, nheads_kv=nheads_kv, headdim=32, dtype=dtype
        )
        bad += checked(plan)[1]
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


@one_mpi
@pytest.mark.parametrize("distribution", deeper(SHARED_OUT, ["zigzag"]))
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=["full", "causal"])
def test_huge_logits(comm, method, mask, distribution):
    """Logits of 1e4 and more give finite and correct results."""
    seqlen, headdim, size = 64, 32, 2500.0
    plan = method(mask, seqlen=seqlen, nheads=NHEADS, headdim=headdim, distribution=distribution)
    q, k, *_ = inputs(seqlen, NHEADS, headdim, size)
    assert np.abs(np.einsum("qhd,khd->hqk", q, k)).max() * headdim**-0.5 > 1e4
    found = run(plan, *inputs(seqlen, NHEADS, headdim, size))
    bad = failures(plan, found, mask, seqlen, NHEADS, headdim, size)
    bad += [name for name, x in found.items() if not np.isfinite(x).all()]
    assert_all(comm, not bad, "; ".join(bad))


def mask_with_masked_rows(seqlen):
    """Return a mask in which every third query and the whole last part see no key."""
    tokens = np.arange(seqlen)
    begin = np.maximum(tokens - 40, 0)
    end = np.where((tokens % 3 == 0) | (tokens > seqlen - 20), begin, tokens + 1)
    return IntervalMask(begin, end)


@one_mpi
@pytest.mark.parametrize("distribution", deeper(DISTRIBUTIONS, ["zigzag"]))
@pytest.mark.parametrize("seqlen", [2, 100])
def test_queries_that_see_nothing(comm, method, distribution, seqlen):
    mask = mask_with_masked_rows(seqlen)
    plan = method(mask, seqlen=seqlen, nheads=NHEADS, headdim=7, distribution=distribution)
    found = run(plan, *inputs(seqlen, NHEADS, 7))
    bad = failures(plan, found, mask, seqlen, NHEADS, 7)
    masked = (mask.end <= mask.begin)[plan.tokens]
    silent = (
        (found["out"][masked] == 0).all()
        and np.isneginf(found["lse"][masked]).all()
        and (found["dq"][masked] == 0).all()
    )
    assert_all(comm, silent and not bad, "; ".join(bad) or "a masked row is not silent")


@pytest.mark.parametrize("distribution", deeper([*DISTRIBUTIONS, "balanced"], ["zigzag"]))
def test_same_bits_every_time_and_without_overlap(comm, method, distribution):
    runs = []
    for overlap in (True, True, False):
        plan = method(
            Causal(),
            seqlen=301,
            nheads=NHEADS,
            headdim=16,
            distribution=distribution,
            overlap=overlap,
        )
        for _ in range(2):
            runs.append(run(plan, *inputs(301, NHEADS, 16)))
    bad = [
        f"{name} of run {i}"
        for i, other in enumerate(runs[1:], 2)
        for name in TENSORS
        if other[name].tobytes() != runs[0][name].tobytes()
    ]
    assert_all(comm, not bad, "differs: " + ", ".join(bad))


def test_results_do_not_depend_on_a_late_rank(comm, method):
    import time

    plan = method(Causal(), seqlen=200, nheads=NHEADS, headdim=16)
    first = run(plan, *inputs(200, NHEADS, 16))
    time.sleep(0.3 * (comm.rank == comm.size - 1))
    again = run(plan, *inputs(200, NHEADS, 16))
    same = all(first[x].tobytes() == again[x].tobytes() for x in TENSORS)
    assert_all(comm, same, "a late rank changes the result")


def test_inputs_may_be_strided(comm, method):
    plan = method(Full(), seqlen=60, nheads=NHEADS, headdim=8)
    x = inputs(60, NHEADS, 8)
    q, k, v, dout = (np.asfortranarray(y[plan.tokens]) for y in x)
    out, lse = plan.forward(q, k, v)
    found = dict(zip(TENSORS, (out, lse, *plan.backward(dout, q, k, v, out, lse))))
    bad = failures(plan, found, Full(), 60, NHEADS, 8)
    assert_all(comm, not bad, "; ".join(bad))


def test_messages_are_split(comm, method, monkeypatch):
    monkeypatch.setattr("a2d_mpi.comm.transport.Transport.limit", 1000)
    plan = method(Causal(), seqlen=97, nheads=NHEADS, headdim=8)
    found = run(plan, *inputs(97, NHEADS, 8))
    bad = failures(plan, found, Causal(), 97, NHEADS, 8)
    if plan.traffic.bytes != plan.predicted_traffic():
        bad.append("traffic")
    sent = sum(n for n, _ in plan.traffic.bytes.values())
    if sum(n for n, _ in plan.traffic.messages.values()) < sent / 1000:
        bad.append("messages are not split")
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


@pytest.mark.parametrize("grid, told", [
    ((1, 1, 0), "grid does not fit"), ((1, 1, 2.0), "integers"), ((1, "u", 1), "integers"),
])  # fmt: skip
def test_heads_that_are_no_number(comm, grid, told):
    with pytest.raises(ValueError, match=told):
        ProcessGrid(comm, *grid)


@pytest.mark.multirank
def test_heads_that_cannot_be_shared_out(comm, grid_of):
    grid = grid_of(1, 1, comm.size)
    with pytest.raises(ValueError, match=f"{comm.size} does not divide 7 heads"):
        Attention2D(grid, Full(), seqlen=50, nheads=7, headdim=8)
    with pytest.raises(ValueError, match="order"):
        grid_of(1, 1, comm.size, "rcx")


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
