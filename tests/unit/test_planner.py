"""The planner: which plans there are, and which it prefers."""

import math
import re
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import pytest
from helpers import drive, parser_of
from machines import A100, H100, MACHINES, RESULTS, planned

from a2d_mpi.cli.workloads import read_problem
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.planning import candidate as candidate_module
from a2d_mpi.planning import cost, survey
from a2d_mpi.planning.candidate import Candidate
from a2d_mpi.planning.layouts import known_as, layouts
from a2d_mpi.planning.memory import peak_memory
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.planner import best_candidate, candidates, why_not
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.survey import essence
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.writing import problem_of

CAUSAL = Causal()


def work(seqlen=1 << 16, nheads=96, nheads_kv=None, mask=CAUSAL, backward=True):
    return Workload(seqlen, nheads, 128, nheads_kv, mask=mask, backward=backward)


def test_all_shapes_are_there():
    shapes = [(x.rows, x.cols, x.heads) for x in layouts("attention2d", 12, work(nheads=6), 1)]
    assert len(shapes) == len(set(shapes)) == 6 + 4 + 3 + 2  # heads 1, 2, 3, 6; not 4 or 12
    assert all(r * c * u == 12 for r, c, u in shapes) and {u for *_, u in shapes} == {1, 2, 3, 6}
    rings = [x.positions for x in layouts("ring", 12, work(nheads=6), 1)]
    assert sorted(rings) == [2, 4, 6, 12]
    double = list(layouts("double ring", 12, work(nheads=6), 1))
    assert all(min(x.rows, x.cols) > 1 for x in double)
    assert not list(layouts("striped ring", 12, work(mask=Full()), 1))
    # On one node, or with one rank each, no order differs from another.
    for ranks_per_node in (1, 64):
        assert {x.order for x in layouts("attention2d", 64, work(), ranks_per_node)} == {"rcu"}


def test_orders_differ_in_who_shares_a_node():
    found = [x for x in layouts("attention2d", 64, work(), 4) if (x.rows, x.cols) == (8, 8)]
    assert {x.order for x in found} == {"rcu", "cru"}
    cube = [x for x in layouts("attention2d", 64, work(), 4) if x.rows == x.cols == x.heads == 4]
    assert len(cube) == 3  # one axis is inside the nodes
    for layout in layouts("double ring", 64, work(), 4):
        assert layout.order.index("r") < layout.order.index("c")


def test_one_axis_inside_the_nodes():
    """Orders differ on A100 nodes, and bytes between nodes follow the layout."""
    job = work(backward=False, mask=Full())
    n, p = 1024, 96 * 128 * 2
    across = planned(A100, "attention2d", Layout(8, 8), job)  # rows of eight ranks: two nodes
    assert across.crossing == 4 * n * (4 * (p + p + 96 * 4) + 7 * 2 * p)
    assert across.received == n * (7 * (2 * p + 96 * 4) + 7 * 2 * p)


def test_sorted_and_consistent():
    job = work(1 << 14)
    for machine in (H100, A100):
        found = candidates(machine, 8, job, number=None)
        assert all(a.seconds <= b.seconds for a, b in pairwise(p for p in found if p.fits))
        for plan in found:
            assert sum(plan.split.values()) == pytest.approx(plan.seconds)
            whole = replace(plan.layout, slices=None)
            again = Candidate(machine, plan.method, whole, [(1, job)])
            bounds = [again.bound] + [again.bound for _ in iter(again.refine, False)]
            assert bounds == sorted(bounds) and 0.6 * bounds[-1] < bounds[2] <= bounds[-1]
            if plan.layout.heads == 1:
                assert plan.over_bound >= 1
    names = {known_as(p.method, p.layout) for p in found}
    assert names == {"", "USP", "Ulysses", "tree", "all-gather"}


def _of_ranks(method, layout, sizes):
    """What each of twelve ranks receives, and the bytes that it holds."""
    moves = [x for x in cost.moves(method, layout, sizes, None) if not x.sent]
    return moves, [peak_memory(method, layout, sizes, p, True) for p in range(12)]


@pytest.mark.parametrize("seqlen, nheads_kv", [
    (29, 1), pytest.param(1 << 13, 2, marks=pytest.mark.thorough),  # with two units, too
])  # fmt: skip
@pytest.mark.parametrize("node_size, methods", [(5, tuple(METHODS)), (4, ("node aware",))])
def test_all_ranks_at_once_as_one_by_one(seqlen, nheads_kv, node_size, methods):
    """What the planner says of the busiest rank and node, from the messages of each rank."""
    job = work(seqlen, 2, nheads_kv)
    machine = replace(A100, ranks_per_node=node_size)
    found = candidates(machine, 12, job, methods=methods, number=None)
    assert len(found) > 5
    of_ranks = lru_cache(None)(_of_ranks)  # the same for all orders of the axes
    for plan in found:
        method, layout = plan.method, plan.layout
        sizes = problem_of(plan.method, layout, job, job.mask)
        node = layout.world_ranks() // node_size
        received, crossing = [0] * 12, [0] * 3
        moves, held = of_ranks(method, essence(method, layout), sizes)
        for move in moves:
            assert move.peer != move.rank
            received[move.rank] += move.nbytes
            crossing[node[move.rank]] += move.nbytes * (node[move.rank] != node[move.peer])
        expected = max(received), max(crossing)
        assert (plan.received, plan.crossing) == expected, (method, layout)
        # It cannot tell whose keys are in order.
        assert max(held) <= plan.memory <= 1.1 * max(held), (method, layout)


def test_where_the_triangle_helps():
    """The planner picks the triangle, even with idle ranks."""
    machine = read_machine(RESULTS / "64x1.toml")
    job = Workload(768, 10, 16, mask=Causal(), dtype="float32", backward=True)
    assert best_candidate(machine, 6, replace(job, nheads=1, nheads_kv=1)).method == "triangle"
    best, *_ = candidates(machine, 64, job, idle=0.1, methods=("attention2d", "triangle"))
    assert (best.method, best.layout.size, best.layout.heads) == ("triangle", 60, 10)
    assert candidates(machine, 64, job, methods=("triangle",)) == []


@pytest.mark.thorough
def test_many_ranks_take_few_steps(monkeypatch):
    """A program is read once for all ranks that run it, and few plans are simulated."""
    steps, simulations = [], []
    simulated = candidate_module.simulated
    monkeypatch.setattr(
        candidate_module, "simulated", lambda *x: simulations.append(x) or simulated(*x)
    )
    survey._tape.cache_clear()
    found = candidates(
        H100, 48, work(1 << 18), progress=lambda xs: (steps.append(1) or x for x in xs)
    )
    assert len(found) <= len(steps) < 4 * len(found)
    assert sum(x.was_simulated for x in found) < len(found) / 4
    assert len(simulations) < len(found)  # with more slices, too; there are two phases
    programs = survey._tape.cache_info()
    assert 0 < programs.misses < programs.hits / 3


@pytest.mark.parametrize("machine, ranks, nheads, nheads_kv, mask", [
    (H100, 24, 1, 1, Causal()),
    (A100, 16, 8, 2, Full()),  # with a head axis, too
    *(pytest.param(*x, marks=pytest.mark.thorough) for x in (
        (H100, 36, 1, 1, Full()), (A100, 16, 16, 4, Causal()),
    )),
])  # fmt: skip
def test_the_pick_is_the_fastest_of_all(machine, ranks, nheads, nheads_kv, mask):
    """The pick is the fastest of all plans if all are simulated."""
    job = work(1 << 16, nheads, nheads_kv, mask=mask)
    everything = candidates(machine, ranks, job, number=None)
    (best, *others), first = candidates(machine, ranks, job), everything[0]
    assert (best.method, best.layout, best.seconds) == (first.method, first.layout, first.seconds)
    seconds = {(x.method, x.layout): x.seconds for x in everything}
    for x in others:  # sums of another order differ by a bit; bounds are for one slice
        of_all = seconds.get((x.method, x.layout), math.inf)
        assert x.was_simulated or x.bound <= (1 + 1e-12) * of_all


def test_memory_limits():
    job = work()
    free = candidates(replace(H100, memory=None), 16, job)
    # With more slices, plans fit that need more than this in one slice.
    limit = int(0.3 * sorted(p.memory for p in free)[len(free) // 2]) + H100.reserved
    tight = replace(H100, memory=limit)
    found = candidates(tight, 16, job)
    assert len(found) == len(free)
    fitting = [p for p in found if p.fits]
    assert 0 < len(fitting) < len(found) and found[: len(fitting)] == fitting
    assert all(p.memory + H100.reserved <= limit for p in fitting)
    assert why_not(found[-1], found[0]) == "does not fit in memory"
    assert best_candidate(tight, 16, job).layout == fitting[0].layout
    with pytest.raises(ValueError, match="the smallest needs"):
        best_candidate(replace(H100, memory=1000), 16, job)
    with pytest.raises(ValueError, match="no plan of double ring fits 7 ranks"):
        best_candidate(H100, 7, job, methods=("double ring",))
    assert candidates(H100, 1, job)[0].received == 0


def test_narrow_values_take_less():
    """Predicted time falls with the width of the values."""
    parser, seconds = parser_of("drivers/plan.py"), []
    sizes = "--profile data/machines/h100-8.toml --ranks 4 --seqlen 64K --nheads 8 --backward"
    for width in ("", "--headdim-v 192", "--headdim-v 128"):
        args = parser.parse_args(f"{sizes} --headdim 192 {width}".split())
        machine, problem = read_problem(args)
        phases = predict(machine, "attention2d", Layout(2, 2), problem)
        seconds.append([phases[x].total.max() for x in ("forward", "backward")])
    ratios = np.divide(seconds[2], seconds[0])
    assert seconds[0] == seconds[1]
    # Where computing decides: (192 + 128) / (2 192), and (3 192 + 2 128) / (5 192).
    assert np.allclose(ratios, (0.833, 0.867), atol=0.03), ratios


run = partial(drive, "plan.py", 0)


OPTIONS = ("--profile", MACHINES / "h100-64x1.toml", "--ranks", 64, "--seqlen", "64K",
           "--nheads", 96)  # fmt: skip


def test_driver():
    few = (*OPTIONS, "--ranks", 20)
    done = run(*few, "--mask", "causal", "--backward", "--top", 5)
    lines = done.stdout.splitlines()
    assert lines[0] == "64 nodes of one H100: 20 ranks, 1 per node, 80 GB per rank (6 GB reserved)"
    table = lines[lines.index("") + 2 :]
    assert len([line for line in table if line.startswith(tuple(METHODS))]) == 5
    assert "no plan with 20 ranks that share the heads: 20 does not divide 96 heads" in lines
    # k and v of 32K tokens, 128 elements each, of 2 bytes, or 33 bytes for 32.
    for wire, received in (("none", "16.8 MB"), ("mxfp8", "8.65 MB")):
        two = run(*OPTIONS, "--ranks", 2, "--nheads", 1, "--simulate", "all", "--wire", wire)
        ring = re.search(r"^ring .*", two.stdout, re.MULTILINE)[0]
        assert received in ring, two.stdout + two.stderr
