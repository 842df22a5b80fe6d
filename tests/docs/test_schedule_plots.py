"""`drivers/plot.py schedule`, `masks` and `grid` show what the schedules say."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, deeper, runs_on

from a2d_mpi import Causal, Full, IntervalMask
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.layout import Layout
from a2d_mpi.figures import schedule_plots
from a2d_mpi.figures.mask_plots import tiling
from a2d_mpi.figures.pictures import METHOD_STYLES
from a2d_mpi.masks.compiled import compile_mask
from a2d_mpi.masks.patterns import PATTERNS, make_mask
from a2d_mpi.planning import cost
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.writing import problem_of
from a2d_mpi.sharding.choice import CHOICES
from a2d_mpi.sharding.distribution import distribute

MACHINE = ROOT / "data" / "machines" / "a100-16x4.toml"


def work(seqlen=61, mask=None, **others):
    return Workload(seqlen, 4, 8, 2, mask=mask or Causal(), backward=True, **others)


def packed(seqlen):
    """Return documents of 20 tokens whose first 3 tokens see no key."""
    begin = np.arange(seqlen) // 20 * 20
    return IntervalMask(begin, np.where(np.arange(seqlen) < 3, 0, np.minimum(begin + 20, seqlen)))


@pytest.mark.parametrize("heads", deeper([1, 2], [1]))
@pytest.mark.parametrize("method", METHODS)
def test_every_visible_pair_is_computed_once(method, heads):
    """One rank of each head slice computes a pair, in both phases."""
    # 515 tokens travel in several chunks between two ranks; 3 tokens leave empty shards.
    cases = [(2, 3, 61), (3, 2, 61), (2, 2, 515), (1, 2, 515), (4, 1, 61), (2, 2, 3), (1, 1, 9)]
    for (rows, cols, n), overlap in zip(cases, [True, False] * len(cases)):
        layout = Layout(rows, cols, heads)
        for mask in (x for x in (Full(), Causal(), packed(n)) if runs_on(method, layout, x)):
            problem, seen = work(n, mask, overlap=overlap), mask.dense(np.arange(n), np.arange(n))
            calls = {phase: np.zeros((heads, n, n), int) for phase in PHASES}
            for phase, found in calls.items():
                for rank, q, k in schedule_plots.blocks(method, phase, layout, problem):
                    found[rank % heads][np.ix_(q, k)] += mask.dense(q, k)
                assert (found == seen).all(), (layout, mask, phase)
            shown = schedule_plots.who_computes(method, layout, problem)
            assert ((shown >= 0) == seen).all(), (layout, mask)
            assert (shown[:, seen] % heads == np.arange(heads)[:, None]).all(), (layout, mask)


@pytest.mark.parametrize(
    "method, layout",
    [
        (method, layout)
        for layout in (Layout(2, 3), Layout(2, 2, 2, "ucr"), Layout(1, 2), Layout(1, 1))
        for method in METHODS
        if runs_on(method, layout, Causal())
    ],
)
def test_panels(method, layout):
    """Bytes equal the cost model, and times the simulator, with world ranks."""
    machine, problem = read_machine(MACHINE), work(700)
    shown = schedule_plots.panels(machine, method, layout, problem, "causal")
    sizes = problem_of(method, layout, problem, problem.mask)
    predicted = predict(machine, method, layout, problem)
    assert shown.received.keys() == shown.spans.keys() == set(PHASES)
    for rank, place in enumerate(layout.world_ranks()):
        traffic = cost.traffic(method, layout, sizes, rank)
        for phase in PHASES:
            both = [sum(x[i] for key, x in traffic.items() if key[0] == phase) for i in (0, 1)]
            bytes_ = shown.received[phase]
            assert [bytes_[:, place].sum(), bytes_[place].sum()] == both, (phase, rank)
            spans, expected = shown.spans[phase][place], predicted[phase]
            assert spans[0][1] == 0 and spans[-1][2] == pytest.approx(expected.total[rank])
            assert all(a[2] == b[1] for a, b in zip(spans, spans[1:]))
            for part in ("compute", "merge", "wait", "other"):
                seconds = sum(end - begin for x, begin, end in spans if x == part)
                assert seconds == pytest.approx(getattr(expected, part)[rank]), (phase, part)
    assert shown.computes.max() == layout.size - 1 and len(shown.computes) == layout.heads


@pytest.mark.parametrize("text", PATTERNS)
def test_tiles_are_those_of_owners(text):
    """The rank of a pair is in the row of the query's owner and the key's column."""
    mask, tokens, owner = make_mask(text, 60), np.arange(60), np.empty(60, int)
    for name in (None, "striped"):
        args = SimpleNamespace(seqlen=60, rows=2, cols=3, distribution=name)
        distribution, found, areas = tiling(text, args)
        assert distribution == name if name else distribution in CHOICES
        shards = distribute(distribution, 60, 2, 3, seen=compile_mask(mask, 60, 60))
        for rank in range(6):
            owner[shards.tokens(rank)] = rank
        ranks = (owner // 3)[:, None] * 3 + (owner % 3)[None, :]
        visible = mask.dense(tokens, tokens)
        assert np.array_equal(found, np.where(visible, ranks, -1))
        assert areas.tolist() == [(found == rank).sum() for rank in range(6)]


def test_a_method_has_one_colour_and_one_marker():
    assert METHOD_STYLES.keys() >= METHODS.keys()
    for i in (0, 1):
        assert len({x[i] for x in METHOD_STYLES.values()}) == len(METHOD_STYLES)
