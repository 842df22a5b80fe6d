"""The order of transfers: gathers before returns where the mask lets ranks gather unevenly."""

import pytest

from a2d_mpi import Causal, Full, SlidingWindow
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning import survey
from a2d_mpi.planning.model import predict, slowest_seconds
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import passes, problem_of, write
from a2d_mpi.schedules.problem import Workload
from a2d_mpi.schedules.steps import PARTIALS, Barrier, Receive, Send, Wait

EMULATED = read_machine("data/results/16x1.toml")
WITHOUT = tuple(x for x in passes.PASSES if x is not passes.gathers_before_returns)
SHAPES = [
    ("attention2d", Layout(4, 4)),
    ("attention2d", Layout(2, 8)),
    ("attention2d", Layout(8, 2)),
    ("node aware", Layout(2, 4, nodes=(0, 0, 0, 0, 1, 1, 1, 1))),
    ("triangle", Layout(10, 1)),
]


@pytest.fixture
def replaced(monkeypatch):
    """Replace a value of a module, and clear cached programs."""

    def forget():
        survey._survey.cache_clear()
        survey._tape.cache_clear()

    def replace(owner, name, function):
        monkeypatch.setattr(owner, name, function)
        forget()

    yield replace
    forget()


def work_of(layout, mask, nheads_kv=8, seqlen=2048):
    return Workload(seqlen, 8, 64, nheads_kv, mask=mask, dtype="float32", backward=True)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(200, 0)], ids=["causal", "window"])
@pytest.mark.parametrize(("method", "layout"), SHAPES)
def test_no_partial_result_leaves_before_the_gathers_are_done(method, layout, mask, overlap):
    if method == "triangle" and not isinstance(mask, Causal):
        return
    work = work_of(layout, mask)
    problem = problem_of(method, layout, work, mask)
    for rank in range(layout.size):
        (program,) = write(method, "forward", layout, problem, rank, overlap)
        entered, passed, here, barriers = None, set(), set(), set()
        for at, step in enumerate(program.steps):
            if isinstance(step, Barrier):
                entered = at if entered is None else entered
                barriers.add(step.index)
                gathered = [
                    x
                    for x in program.steps[:at]
                    if isinstance(x, Receive) and program.arrays[x.rows.array].kind not in PARTIALS
                ]
                assert {x.index for x in gathered} <= here
            elif isinstance(step, Wait):
                here |= set(step.messages)
                passed |= barriers & set(step.messages)
            elif isinstance(step, Send) and program.arrays[step.rows.array].kind in PARTIALS:
                assert barriers and passed == barriers
        assert barriers <= here  # nothing is left of them when the program ends


def test_nobody_waits_without_need():
    """No rank waits under a full mask, or between two ranks."""
    for mask, layout, nheads_kv in (
        (Full(), Layout(4, 4), 8),
        (Causal(), Layout(1, 2), 8),
        (Causal(), Layout(4, 4), 4),
    ):
        problem = problem_of("attention2d", layout, work_of(layout, mask, nheads_kv), mask)
        for rank in range(layout.size):
            (program,) = write("attention2d", "forward", layout, problem, rank)
            assert not any(isinstance(x, Barrier) for x in program.steps)


@pytest.mark.parametrize(("rows", "cols"), [(4, 4), (2, 8), (8, 2)])
def test_a_causal_grid_is_no_slower_than_a_full_one(rows, cols, replaced):
    def seconds(mask):
        phases = predict(EMULATED, "attention2d", Layout(rows, cols), work_of(None, mask))
        return slowest_seconds(phases)

    causal = seconds(Causal())
    assert causal <= 1.01 * seconds(Full())
    replaced(passes, "PASSES", WITHOUT)
    assert seconds(Causal()) > 1.015 * causal


def test_simulated_gain_of_the_triangle(replaced):
    def seconds():
        layout = Layout(15, 1)
        return slowest_seconds(predict(EMULATED, "triangle", layout, work_of(layout, Causal())))

    ordered = seconds()
    replaced(passes, "PASSES", WITHOUT)
    assert seconds() > 1.03 * ordered
