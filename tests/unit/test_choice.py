"""The default distribution is the one of three with the least predicted time."""

import numpy as np
import pytest
from machines import H100, slowest_seconds

from a2d_mpi import Causal, Documents, SlidingWindow
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning import cost
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.planner import best_candidate, candidates
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.writing import problem_of
from a2d_mpi.sharding.choice import CHOICES, choose

MASKS = ("full_document", "causal_document", "share_question", "prefix_lm_causal")


@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize("side", [2, 4])
def test_extremes(text, side):
    """If transfers decide, the fewest bytes win; if computing decides, the most even work wins."""
    n, layout = 4096, Layout(side, side)
    mask = make_mask(text, n)
    work = Workload(n, 1, 1, mask=mask)
    moved, uneven = {}, {}
    for x in CHOICES:
        problem = problem_of("attention2d", layout, work, mask, x)
        moved[x], areas = np.zeros((2, layout.size)), np.zeros(layout.size)
        for rank in range(layout.size):
            for move in cost.moves("attention2d", layout, problem, rank, ("forward",)):
                moved[x][int(move.sent), rank] += move.nbytes
            areas[rank] = cost.pairs("attention2d", layout, problem, rank)
        moved[x], uneven[x] = moved[x].max(), areas.max() / areas.mean()
    slow_links, _ = choose(work.seen, side, side, 2, speed=1e9)
    fast_links, why = choose(work.seen, side, side, 2, speed=1e-3)
    # Bytes are estimated in whole runs.
    assert moved[slow_links] <= 1.15 * min(moved.values())
    assert uneven[fast_links] <= 1.03 * min(uneven.values())
    assert all(name in why for name in CHOICES)
    assert uneven["balanced"] < 1.05 < max(uneven.values())


def test_why():
    work = Workload(1 << 14, 16, 128, mask=Documents([0, 1 << 13, 1 << 14]))
    for mask, name, why in (
        (Causal(), "zigzag", "the default of Causal"),
        (SlidingWindow(8), "contiguous", "the default of SlidingWindow"),
        (work.mask, "contiguous", "least predicted time (of the busiest rank: work over the mean"),
    ):
        shards = problem_of("attention2d", Layout(2, 2), work, mask).queries
        assert shards.name == name and shards.why.startswith(why)
    asked = problem_of("attention2d", Layout(2, 2), work, mask, "balanced").queries
    assert asked.why == "asked for" and asked.name == "balanced"
    assert problem_of("striped ring", Layout(4, 1), work, mask).queries.name == "striped"


def test_planner_tries_all():
    """No other distribution of the fastest plan's shape is faster, and `all` has three of each."""
    tokens = 1 << 13
    work = Workload(tokens, 4, 128, mask=make_mask("causal_document", tokens), backward=True)
    best = best_candidate(H100, 8, work, methods=("attention2d",))
    seconds = {
        x: slowest_seconds(predict(H100, "attention2d", best.layout, work, x)) for x in CHOICES
    }
    assert best.seconds == seconds[best.layout.distribution] == min(seconds.values())
    every = candidates(H100, 4, work, methods=("attention2d",), number=None)
    tried = {(x.layout.rows, x.layout.cols, x.layout.heads): [] for x in every}
    for x in every:
        tried[x.layout.rows, x.layout.cols, x.layout.heads].append(x.layout.distribution)
    spread = {shape: sorted(names) for shape, names in tried.items() if shape[:2] != (1, 1)}
    assert spread and all(names == sorted(CHOICES) for names in spread.values())
