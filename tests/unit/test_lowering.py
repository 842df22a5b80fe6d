"""The passes that lower a method's program, each alone."""

import pytest

from a2d_mpi import Causal, Full
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.accounts import nbytes
from a2d_mpi.schedules import drafts_of, passes, problem_of
from a2d_mpi.schedules.steps import (
    PARTIALS,
    Add,
    Attend,
    Clear,
    Copy,
    Decode,
    Differentiate,
    Encode,
    KernelCall,
    Merge,
    Message,
    Receive,
    Send,
    Wait,
)

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
        ((draft,),) = drafts_of(method, phase, layout, problem, rank)
        program = draft.empty()
        draft.writer(program)
        found.append(program)
    return found


def kind(p, message):
    return p.arrays[message.rows.array].kind


def work(p):
    """Return the tokens of each kernel call."""
    return [
        (p.tokens(x.queries).tolist(), sorted(p.tokens(x.keys).tolist()))
        for x in p.steps
        if isinstance(x, KernelCall)
    ]


@every
@both
def test_keys_by_token(plan, phase):
    unsorted = 0
    for p in written(plan, phase):
        q = passes.keys_by_token(p)
        unsorted += sum(not p.in_order(x.keys) for x in p.steps if isinstance(x, KernelCall))
        assert work(p) == work(q)
        assert all(q.in_order(x.keys) for x in q.steps if isinstance(x, KernelCall))
        apart = {}  # sums by token that are not yet added back
        for step in q.steps:
            if isinstance(step, Differentiate):
                assert q.tokens(step.keys).tolist() == q.tokens(step.dkv).tolist()
                if q.arrays[step.dkv.array].by_token:
                    assert apart[step.dkv.array] == "cleared"
            elif isinstance(step, Clear) and q.arrays[step.rows.array].by_token:
                apart[step.rows.array] = "cleared"
            elif isinstance(step, Add) and q.arrays[step.source.array].by_token:
                assert apart.pop(step.source.array) == "cleared"
                assert q.tokens(step.source).tolist() == q.tokens(step.target).tolist()
            elif isinstance(step, Send) and kind(q, step) == "dkv":
                assert not apart
        assert not apart
    assert (unsorted > 0) == (plan != RING)


@every
def test_merged(plan):
    for p in written(plan, "forward"):
        q = passes.merged(p)
        held, cleared = set(), set()
        for i, step in enumerate(q.steps):
            if isinstance(step, Attend):
                rows = {(step.target.array, i) for run in step.target.runs for i in run}
                if step.target.array.startswith("partial "):
                    assert isinstance(q.steps[i + 1], Merge | Clear)
                else:
                    assert not rows & held
                held |= rows
            elif isinstance(step, Clear):
                assert step.rows.array not in cleared
                cleared.add(step.rows.array)
            elif isinstance(step, Merge):
                assert step.compensation.array in cleared
                assert {(step.target.array, i) for run in step.target.runs for i in run} <= held
        seen = [x for x in p.steps if isinstance(x, Attend) and p.sees(x.queries, x.keys)]
        calls = [x for x in q.steps if isinstance(x, Attend)]
        assert len(seen) <= len(calls) <= len(work(p))


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
def test_encoded(plan, phase):
    for p, plain in zip(written(plan, phase, wire="mxfp8"), written(plan, phase), strict=True):
        assert passes.encoded(plain) is plain
        q = passes.encoded(p)
        filled, arrived = set(), set()
        for step, before in zip(q.steps, [None, *q.steps]):
            if isinstance(step, Encode | Decode):
                wire = [q.arrays[x.array].wire for x in step]
                assert wire == [isinstance(step, Decode), isinstance(step, Encode)]
                filled.add(step.target.array)
                assert isinstance(step, Encode) or step.source.array in arrived
            elif isinstance(step, Message):
                assert q.arrays[step.rows.array].wire
                if isinstance(step, Send):
                    assert step.rows.array in filled | arrived
                    changes = kind(q, step) in PARTIALS
                    assert not changes or isinstance(before, Encode)
                else:
                    arrived.add(step.rows.array)
        sizes = [[nbytes(x, y.rows) for y in x.steps if isinstance(y, Message)] for x in (p, q)]
        assert all(a > b for a, b in zip(*sizes, strict=True))


@every
@both
def test_packed(plan, phase):
    for p in written(plan, phase, seqlen=97):
        q, sent = passes.packed(p), []
        for x in (p, q):
            messages = [y for y in x.steps if isinstance(y, Send)]
            sent.append([x.tokens(y.rows).tolist() for y in messages])
        assert sent[0] == sent[1]
        assert all(len(x.rows.runs) == 1 for x in q.steps if isinstance(x, Send))


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
        q = passes.in_turn(p)
        assert sorted(map(str, p.steps)) == sorted(map(str, q.steps))
        travelling, calls = set(), len(work(p))
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


@both
def test_alone(phase):
    """One call writes the results of a rank alone, in the dtype in which the caller gets them."""
    (p,) = written(("attention2d", Layout(1, 1)), phase, dtype="bfloat16")
    q = passes.alone(p)
    (call,) = q.steps
    assert isinstance(call, Attend) or call.fresh
    for rows in q.results.values():
        array = q.arrays[rows.array]
        assert array.role == "result" and set(array.accumulated) <= {"lse"}
    (p, *_) = written(GRID, phase)
    assert passes.alone(p) is p


@every
@both
def test_drained(plan, phase):
    for p in written(plan, phase):
        q = passes.drained(p)
        assert q.steps[: q.body] == p.steps
        waited = [x for step in q.steps if isinstance(step, Wait) for x in step.messages]
        assert sorted(waited) == list(range(p.messages))
