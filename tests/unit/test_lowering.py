"""Passes whose faults no result of a plan shows; tests/ranks holds the others to float64."""

import pytest

from a2d_mpi import Causal, Full
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.schedules import options, passes
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import (
    PARTIALS,
    Attend,
    AttendAndMerge,
    Copy,
    KernelCall,
    Message,
    Receive,
    Send,
    Wait,
)
from a2d_mpi.schedules.writing import drafts_of, problem_of

GRID, RING = ("attention2d", Layout(2, 3)), ("ring", Layout(5, 1))
AWARE = ("node aware", Layout(2, 4, nodes=(0, 0, 1, 1, 0, 0, 1, 1)))
TRIANGLE = ("triangle", Layout(10, 1))
every = pytest.mark.parametrize("plan", [GRID, RING, AWARE, TRIANGLE], ids=lambda x: x[0])
both = pytest.mark.parametrize("phase", ["forward", "backward"])


def written(plan, phase, mask=None, seqlen=601, **options):
    """Return the programs of all ranks as a method writes them."""
    method, layout = plan
    config = AttentionConfig(seqlen, 4, 32, 2, **options)
    problem, found = problem_of(method, layout, config, mask or Causal()), []
    for rank in range(layout.size):
        (draft,), _ = drafts_of(method, phase, layout, problem, rank)
        program = Program(draft.group, draft.rank, draft.ranks)
        draft.writer(program)
        found.append(program)
    return found


def kind(p, message):
    return p.arrays[message.rows.array].kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded(dtype):
    """Sums that other ranks add to are rounded once, when they are sent."""
    copies = 0
    for p in written(AWARE, "forward", dtype=dtype):
        copied = (x.target.array for x in p.steps if isinstance(x, Copy))
        copies += sum(x.startswith("rounded") for x in copied)
        sent = [p.arrays[x.rows.array] for x in p.steps if isinstance(x, Send)]
        if dtype == "bfloat16":
            assert not any(x.kind == "out" and "out" in x.accumulated for x in sent)
    assert (copies > 0) == (dtype == "bfloat16")


@every
@both
def test_receives_first(plan, phase):
    for p in written(plan, phase):
        q = passes.receives_first(p)
        for keeps in (True, False):  # the order of receives, and that of all others
            orders = [[y for y in x.steps if isinstance(y, Receive) == keeps] for x in (p, q)]
            assert orders[0] == orders[1]
        if plan == RING:
            assert q.steps == p.steps  # it uses memory again
            continue
        first = next(i for i, x in enumerate(q.steps) if isinstance(x, KernelCall))
        assert not any(isinstance(x, Receive) for x in q.steps[first:])


@every
@both
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=["causal", "full"])
def test_in_turn(plan, phase, mask):
    """No message of rows is under way during a call; a grid returns results after all calls."""
    if plan == TRIANGLE and mask != Causal():
        return
    for p in written(plan, phase, mask):
        q = options.in_turn(p)
        assert sorted(map(str, p.steps)) == sorted(map(str, q.steps))
        travelling, calls = set(), sum(isinstance(x, KernelCall) for x in p.steps)
        for step in q.steps:
            if isinstance(step, Message) and kind(q, step) not in PARTIALS:
                travelling |= {step.index} if isinstance(step, Receive) else set()
            elif isinstance(step, Wait):
                travelling -= set(step.messages)
            elif isinstance(step, KernelCall):
                calls -= 1
                assert not travelling
            elif isinstance(step, Send) and plan != RING:
                assert calls == 0
        assert not travelling


@every
def test_merged(plan):
    """Each row of a result is written once, before others are merged into it."""
    for p in written(plan, "forward"):
        rows = set()
        for step in (x for x in p.steps if isinstance(x, Attend)):
            target = {(step.target.array, i) for run in step.target.runs for i in run}
            merges = isinstance(step, AttendAndMerge)
            assert target <= rows if merges else not target & rows
            rows |= target
        assert {x for x in rows if x[0] == "out"} == {("out", i) for i in range(rows_of(p))}
        q = passes.merged(p)
        assert not any(isinstance(x, AttendAndMerge) for x in q.steps)


def rows_of(p):
    (own,) = p.results["out"].runs
    return len(own)


@both
def test_alone(phase):
    """One call writes the results of a rank alone, in the dtype in which the caller gets them."""
    (p,) = written(("attention2d", Layout(1, 1)), phase, dtype="bfloat16")
    q = options.alone(p)
    (call,) = q.steps
    assert isinstance(call, Attend) or call.fresh
    for rows in q.results.values():
        array = q.arrays[rows.array]
        assert array.role == "result" and set(array.accumulated) <= {"lse"}
    (p, *_) = written(GRID, phase)
    assert options.alone(p) is p
