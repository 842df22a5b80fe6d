"""Slices of the heads: memory, the order of execution, and the choice."""

import doctest
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from machines import H100, planned, slowest_seconds

from a2d_mpi import Causal
from a2d_mpi.attention import executor
from a2d_mpi.comm import watch
from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.planner import candidates
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.slices import ALIVE, SMALLEST, default
from a2d_mpi.schedules.steps import KINDS as TENSORS_OF
from a2d_mpi.schedules.steps import Clear, KernelCall, Message, Receive, Rows, Send, Wait
from a2d_mpi.schedules.writing import problem_of, write

CAUSAL = Causal()
EVERY = [  # layouts for which programs are written, without MPI
    ("attention2d", Layout(2, 3)),
    ("attention2d", Layout(1, 1, 4)),
    ("attention2d", Layout(2, 2, 2)),
    ("ring", Layout(4, 1)),
    ("double ring", Layout(2, 2)),
    ("triangle", Layout(6, 1)),
    ("node aware", Layout(2, 4, nodes=(0, 0, 1, 1, 2, 2, 3, 3))),
]


def programs_of(
    method, layout, phase, slices, nheads_kv=8, rank=0, lengths=(1201, 1201), mask=CAUSAL
):
    """Return the parts of programs of a rank in this number of slices."""
    config = AttentionConfig(lengths[0], 16, 8, nheads_kv, seqlen_kv=lengths[1])
    layout = replace(layout, slices=(slices, slices))
    problem = problem_of(method, layout, config, mask)
    return write(method, phase, layout, problem, rank), layout, problem


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("method, layout", EVERY, ids=str)
def test_the_pipeline(method, layout, phase):
    """Parts keep their order, and messages are waited for once."""
    parts, *_ = programs_of(method, layout, phase, 8 // layout.heads)
    seen, posted = Counter(), set()
    for p in parts:
        key = p.slice, p.stage
        assert p.slice == 0 or seen[p.slice - 1, p.stage] > seen[key]
        seen[key] += 1
        for step in p.steps:
            if isinstance(step, Message):
                posted.add((*key, step.index))
            if isinstance(step, Wait):
                posted.difference_update((*key, x) for x in step.messages)
    assert set(seen.values()) == {3} and not posted


def extents(p, rows, inputs):
    """Return the memory of rows, by tensor: its name, and the first and the last byte."""
    array = p.arrays[rows.array]
    for i, (name, width) in enumerate(zip(TENSORS_OF[array.kind], p.group.row_bytes(array))):
        where, offset, _ = inputs.get(name, ((name, "caller"), 0, 0))
        if array.role != "given":
            memory = array.memory if array.role == "buffer" else f"{p.stage}.{p.slice} {name}"
            where, offset = (memory, i), 0
        for x in rows.runs:
            yield name, where, offset + x.start * width, offset + x.stop * width


def races(parts):
    """Return the steps that touch memory of messages under way, or read what others overwrote."""
    found, under_way, writes = [], {}, []
    inputs, results = {}, {}  # of programs: place and time of each tensor
    for now, p in enumerate(parts):
        key, before = (p.slice, p.stage), (p.slice, p.stage - 1)
        given = inputs.setdefault(key, results.get(before, {}))
        for step in p.steps:
            if isinstance(step, Wait):
                for x in step.messages:
                    del under_way[(*key, x)]
                continue
            rows, touched = [x for x in step if isinstance(x, Rows)], []
            for x in rows:
                is_target = len(rows) > 1 and x in (rows[2:] or rows[1:])
                writing = is_target or isinstance(step, Receive | Clear)
                for name, where, *ends in extents(p, x, given):
                    touched.append((writing, where, *ends))
                    if writing:
                        writes.append((now, key, where, *ends))
                    elif p.arrays[x.array].role == "given" and name in given:
                        since = given[name][2]
                        overwritten = (y for t, by, *y in writes if t > since and by != before)
                        found += [step for y in overwritten if overlap(y, (where, *ends))]
            others = [y for held in under_way.values() for y in held]
            found += [
                step for x in touched for y in others if (x[0] or y[0]) and overlap(x[1:], y[1:])
            ]
            if isinstance(step, Message):
                under_way[(*key, step.index)] = touched
        results[key] = {
            name: (where, begin, now)
            for rows in p.results.values()
            for name, where, begin, _ in extents(p, rows, given)
        }
    return found


def overlap(x, y):
    """Return True if two ranges of bytes, each with the name of its memory, overlap."""
    return x[0] == y[0] and x[1] < y[2] and y[1] < x[2]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("method, layout", [*EVERY, ("ring", Layout(2, 1, 2))], ids=str)
def test_buffers_are_used_in_turn(method, layout, phase):
    """No step touches memory of messages under way, or reads what another program overwrote."""
    for lengths in ((1201, 1201), (5, 5), (97, 61)):
        if method == "triangle" and lengths[0] != lengths[1]:
            continue
        for rank in range(layout.size):
            parts, *_ = programs_of(
                method, layout, phase, 8 // layout.heads, rank=rank, lengths=lengths
            )
            assert not races(parts)


def stuck(ranks):
    """Run the messages of all ranks' parts of programs; return how many steps cannot be done.

    A message is done when both ranks have posted it, as large messages of MPI.
    """
    left, posted = [], set()
    for rank, parts in enumerate(ranks):
        steps, ends = [], {}
        for p in parts:
            for step in p.steps:
                if isinstance(step, Message):
                    kind = p.arrays[step.rows.array].kind
                    between = (rank, p.ranks[step.peer])
                    pair = between if isinstance(step, Send) else between[::-1]
                    # In a triangle, the column of one rank is the row of another.
                    line = {step.channel, *p.channels[step.channel]} - {"row", "col"}
                    what = pair, p.slice, p.stage, frozenset(line), kind, step.tag, step.turn
                    ends[p.slice, p.stage, step.index] = what
                    steps.append((isinstance(step, Send), what))
                elif isinstance(step, Wait):
                    steps += [(None, ends[p.slice, p.stage, x]) for x in step.messages]
        left.append(steps[::-1])
    going = True
    while going:
        going = False
        for steps in left:
            while steps:
                sends, what = steps[-1]
                if sends is None and not {(True, what), (False, what)} <= posted:
                    break
                posted.add((sends, what))
                steps.pop()
                going = True
    return sum(map(len, left))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("method, layout", [*EVERY, ("ring", Layout(6, 1))], ids=str)
def test_ranks_do_not_wait_for_each_other_in_a_circle(method, layout, phase):
    """Masks that hide much: some ranks have nothing to compute, and only pass rows on."""
    rng = np.random.default_rng(0)
    for case in range(12):
        begin = rng.integers(0, 41, 41) * (rng.random(41) < 0.6)
        end = np.where(
            rng.random(41) < 0.7, begin, np.minimum(begin + rng.integers(0, 20, 41), 41)
        )
        mask = Causal() if method == "triangle" else IntervalMask(begin, end)
        ranks = [
            programs_of(method, layout, phase, 4 // layout.heads, 8, x, (41, 41), mask)[0]
            for x in range(layout.size)
        ]
        assert stuck(ranks) == 0, case


@pytest.mark.parametrize("method, layout", EVERY[:3], ids=str)
def test_the_next_slice_travels_while_this_one_computes(method, layout):
    parts, *_ = programs_of(method, layout, "forward", 8 // layout.heads)
    flat = [(p.slice, step) for p in parts for step in p.steps]
    first = next(i for i, (x, step) in enumerate(flat) if x == 0 and isinstance(step, KernelCall))
    assert any(x == 1 and isinstance(step, Message) for x, step in flat[:first])


def test_default():
    """Large messages between nodes are cut, down to a size, into whole KV heads."""
    config = AttentionConfig(16 * 4 * SMALLEST // 2048, 8, 32)  # k and v of a token: 2048 bytes
    assert default(config, Layout(4, 4)) == (4, 4)
    for tokens, slices in ((config.seqlen // 2, 2), (config.seqlen // 4, 1)):
        fewer = replace(config, seqlen=tokens, seqlen_kv=tokens)
        assert default(fewer, Layout(4, 4)) == (slices, slices)
    assert default(config, Layout(4, 4, nodes=(3,) * 16)) == (1, 1)
    assert default(config, Layout(1, 1)) == (1, 1)
    assert default(replace(config, nheads_kv=1), Layout(4, 4)) == (1, 1)


def test_the_planner_tries_slices():
    """The pick is simulated with its slices; with little memory, plans take more slices."""
    work = Workload(1 << 17, 8, 128, mask=Causal(), backward=True)
    found = planned(H100, "attention2d", Layout(4, 4), work)
    assert found.layout.slices in (None, (1, 1))
    best = candidates(H100, 16, work, methods=("attention2d",))
    sliced = next(x for x in best if x.layout.positions == 16 and x.was_simulated)
    assert sliced.layout.slices == (8, 8) or min(sliced.layout.slices) > 1
    predicted = predict(H100, sliced.method, sliced.layout, work)
    assert sliced.seconds == pytest.approx(slowest_seconds(predicted))
    whole = predict(H100, sliced.method, replace(sliced.layout, slices=None), work)
    assert sliced.seconds < 0.95 * slowest_seconds(whole)
    limit = int(0.8 * found.memory)
    small = replace(H100, memory=limit + H100.reserved)
    tight = planned(small, "attention2d", Layout(4, 4), work)
    assert tight.fits and tight.layout.slices[0] > 2 and tight.memory < limit


def test_tags():
    """Messages that may travel at once have tags of their own, of those that MPI guarantees."""
    found = doctest.testmod(executor)
    assert found.failed == 0 < found.attempted
    owners, turns = range(8), range(20)
    every = [executor.mpi_tag(*x) for x in product(TENSORS_OF, owners, turns, range(ALIVE))]
    assert len(set(every)) == len(every) and max(every) + 3 < watch._TAG < 1 << 15
