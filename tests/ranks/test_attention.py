"""The distributed algorithms against float64, on every grid that the ranks of this run make."""

import time
from dataclasses import replace
from functools import partial
from itertools import cycle, permutations, product

import numpy as np
import pytest
from cases import METHODS, MORE, NHEADS, PLANS, SIZE, differing, label, takes, wrong_plans
from dense import problem_for, results_of, wrong_with
from helpers import DEEPER, assert_all, deeper
from machines import H100
from mpi4py import MPI
from oracles import documents, heavy_tailed

from a2d_mpi import Attention2D, Causal, Full, IntervalMask, ProcessGrid
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning.planner import best_candidate
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules import line
from a2d_mpi.sharding import distribution as distributions

pytestmark = pytest.mark.mpi
FULL, CAUSAL, N = Full(), Causal(), 97
I = np.arange(N)  # noqa: E741
WINDOW, PACKED = IntervalMask(I - 9, I + 1), documents(heavy_tailed(N, 1, 9))
IRREGULAR = IntervalMask(np.where(I % 5, I - 30, 60), np.where(I % 7, I + 5, 20))
HEADS = (1, 7), (1, 64), (6, 32)  # KV heads, headdim
NAMES = [x for x in distributions.FORMULAS if x != "triangle"] + ["balanced", None]

# Mask, tokens, KV heads of six heads, headdim, dtype, distribution.
CASES = {
    "small": [
        (FULL, 1, 6, 7, "float32", "contiguous"),
        (FULL, 3, 1, 7, "float64", "zigzag"),
        (CAUSAL, 3, 1, 16, "float64", None),
        (CAUSAL, N, 6, 16, "float32", None),
        (FULL, N, 2, 16, "float64", "zigzag"),
        (CAUSAL, N, 1, 64, "bfloat16", "striped"),
        (FULL, 64, 6, 16, "float16", None),
        (CAUSAL, N, 1, 16, "float16", "zigzag"),
        (WINDOW, N, 2, 16, "bfloat16", "contiguous"),
        (PACKED, N, 6, 16, "float64", "balanced"),
        (IRREGULAR, N, 1, 16, "float32", "zigzag"),
        (IRREGULAR, N, 2, 16, "float64", "striped"),
    ],
    "cut": [  # long chunks are cut into units
        (FULL, N, 6, 16, "float32", "zigzag"),
        (CAUSAL, N, 1, 16, "float32", None),
        (WINDOW, N, 6, 16, "float32", "striped"),
    ],
    "large": [
        (CAUSAL, 1009, 1, 64, "float64", "zigzag"),
        (FULL, 1009, 6, 32, "float64", "zigzag"),
        (CAUSAL, 1009, 6, 32, "bfloat16", None),
    ],
    "pairs": [  # of length and heads, and nearly all of two options
        ((FULL, CAUSAL, CAUSAL, FULL)[i % 4], n, *heads, dtype, NAMES[(i - i // 9) % 5])
        for i, ((n, heads), dtype) in enumerate(
            zip(2 * list(product((7, 64, 1009), HEADS)), cycle(("float32", "float64")))
        )
    ],
}
# On 6 ranks, which take longest, the first tier has the small ones only.
FIRST = ["small", "cut", "large"][: 3 if SIZE < 5 else 1]
RUNS = [
    pytest.param(name, group, marks=() if name in PLANS and group in FIRST else DEEPER)
    for name, group in product([*PLANS, *MORE], CASES)
    if group != "pairs" or (name in PLANS and SIZE < 5)
]


@pytest.mark.parametrize("name, group", RUNS)
def test_results(comm, grid_of, monkeypatch, name, group):
    """Results equal float64, bytes and buffers their predictions; the same bits in turn.

    The error of 16-bit tensors is at most twice that of float32 rounded at the end.
    """
    kind, shape, nodes = (PLANS | MORE)[name]
    if group == "cut":
        monkeypatch.setattr(line, "GRAIN", 4)
    grid, bad = grid_of(*shape, nodes=nodes), []
    for number, case in enumerate(CASES[group]):
        mask, seqlen, nheads_kv, headdim, dtype, distribution = case
        if not takes(kind, mask):
            continue
        sizes = {"seqlen": seqlen, "nheads": NHEADS, "nheads_kv": nheads_kv, "headdim": headdim}
        if "Triangle" not in name:
            sizes["distribution"] = distribution
        make = partial(kind, grid, mask, dtype=dtype, **sizes)
        # Large ones take as long as all others; with 6 ranks every second one is enough.
        both = group != "large" and (SIZE < 5 or number % 2 == 0)
        bad += [f"{case}: {x}" for x in wrong_plans(make, both)]
    assert_all(comm, not bad, "; ".join(bad))


@pytest.fixture(scope="module", params=METHODS, ids=label)
def method(request, comm):
    algorithm, shape = request.param
    grid = ProcessGrid(comm, *shape)
    yield partial(algorithm, grid)
    grid.free()


SIZES = {"seqlen": 301, "nheads": NHEADS, "headdim": 16}


@pytest.mark.grids
@pytest.mark.parametrize("distribution", deeper(NAMES[:-1], ["zigzag"]))
def test_the_same_bits(comm, method, distribution, monkeypatch):
    """What the order of events, of memory and of messages is does not change a bit."""
    make = partial(method, CAUSAL, **SIZES, distribution=distribution)
    plan = make()
    given = problem_for(plan)
    first = results_of(plan, given)
    bad = differing(first, results_of(plan, given, upload=np.asfortranarray))
    time.sleep(0.3 * (comm.rank == comm.size - 1))
    bad += differing(first, results_of(plan, given))
    plan.free()
    monkeypatch.setattr("a2d_mpi.comm.transport.Transport.limit", 1000)
    for overlap in (True, False):
        plan = make(overlap=overlap)
        bad += [f"{x} of split messages" for x in differing(first, results_of(plan, given))]
        bad += ["traffic"] * (plan.traffic.bytes != plan.predicted_traffic())
        sent, split = (
            sum(n for n, _ in x.values()) for x in (plan.traffic.bytes, plan.traffic.messages)
        )
        bad += ["messages are not split"] * (split < sent / 1000)
        plan.free()
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
    bad += wrong_with(Attention2D(grid, CAUSAL, seqlen=90, nheads=NHEADS, headdim=8))
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.multirank
def test_nodes_of_the_machine(comm, grid_of):
    """Ranks that share memory are on a node; the caller's nodes come first."""
    given = [5, 5, 3, 3] + [8] * (comm.size - 4)
    grids = grid_of(1, comm.size), grid_of(comm.size, 1, nodes=given)
    found = [grid.layout.nodes for grid in grids]
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    alone = shared.size == comm.size
    shared.Free()
    expected = (0,) * comm.size, (0, 0, 2, 2) + (4,) * (comm.size - 4)
    assert_all(comm, not alone or tuple(found) == expected, f"{found}")


@pytest.mark.one_mpi
@pytest.mark.parametrize("method", ["attention2d", *["ring"] * (SIZE > 1)])
def test_planned_grid(comm, grid_of, method):
    """A planner's grid, whose distribution plans take; on other grids they choose their own."""
    mask = make_mask("causal_document", 4096)
    work = Workload(4096, 4, 64, mask=mask, backward=True)
    best = best_candidate(H100, comm.size, work, methods=(method,)).layout
    grid = ProcessGrid.from_layout(comm, best)
    found = replace(grid.layout, nodes=None)  # which the methods do not know
    assert_all(comm, found == best, f"{found}, planned {best}")
    sizes = {"seqlen": 4096, "nheads": 4, "headdim": 64, "dtype": "bfloat16"}
    shards = Attention2D(grid, mask, **sizes).distribution
    taken = (shards.name, shards.why) == (best.distribution, "the planner's pick")
    assert_all(comm, taken or not best.distribution, f"{shards.name}, {shards.why}")
    grid.free()
    why = Attention2D(grid_of(1, comm.size), mask, **sizes).distribution.why
    chosen = why.startswith("least predicted time") or comm.size == 1
    assert_all(comm, chosen and len(set(comm.allgather(why))) == 1, why)
