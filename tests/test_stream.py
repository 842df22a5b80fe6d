"""Streamed tiles: results, traffic, memory, and programs that reuse no buffer too early."""

from dataclasses import replace

import pytest
from cases import GRIDS, NHEADS, SIZE, TENSORS, accounts, checked, failures, inputs, run
from helpers import assert_all

from a2d_mpi import Attention2D, Causal, Documents, Full, SlidingWindow
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.memory import buffers, most_memory
from a2d_mpi.planning.planner import best_candidate, candidates
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import attention2d, collectives, problem_of, write
from a2d_mpi.schedules.problem import Workload
from a2d_mpi.schedules.steps import Receive, Rows, Send, Wait

SHAPES = {4: [*GRIDS, (2, 1, 2)], 6: [*GRIDS, (1, 6), (1, 3, 2)]}.get(SIZE, GRIDS)
PACKED = Documents([0, 3, 40, 41, 333])
# Mask, tokens, KV heads, dtype, distribution; between two ranks 1300 tokens travel in chunks.
CASES = [
    (Causal(), 3, 2, "float32", None),
    (Causal(), 333, 1, "bfloat16", "striped"),
    (PACKED, 333, NHEADS, "float32", None),
    (Full(), 1300, NHEADS, "float64", None),
    (Causal(), 1300, 2, "float32", None),
]
several = pytest.mark.mpi(min_size=4)


def names(case):
    mask, seqlen, nheads_kv, dtype, distribution = case
    sizes = {"seqlen": seqlen, "nheads": NHEADS, "nheads_kv": nheads_kv, "headdim": 16}
    return mask, {**sizes, "dtype": dtype, "distribution": distribution}


@pytest.mark.multirank
@several
@pytest.mark.parametrize("case", CASES, ids=lambda x: f"{type(x[0]).__name__}-{x[1]}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_traffic_and_memory(comm, grid_of, shape, case):
    """Streaming keeps bytes, messages, out and lse, with less memory."""
    grid, (mask, sizes), bad = grid_of(*shape), names(case), []
    plans = [
        Attention2D(grid, mask, stream=stream, overlap=overlap, **sizes)
        for stream, overlap in ((False, True), (True, True), (True, False))
    ]
    (gathered, _), (streamed, wrong), (in_turn, more) = map(checked, plans)
    bad += wrong + more
    bad += [f"{x} without overlap" for x in TENSORS if differ(streamed, in_turn, x)]
    bad += [f"{x} is not the gathered" for x in ("out", "lse") if differ(gathered, streamed, x)]
    for what in ("bytes", "messages"):
        if getattr(plans[0].traffic, what) != getattr(plans[1].traffic, what):
            bad.append(f"other {what}")
    problem = plans[0].problem
    held = [
        [buffers("attention2d", x.layout, problem, comm.rank, y) for y in (False, True)]
        for x in plans
    ]
    if sizes["seqlen"] > 64 and not all(x > y for x, y in zip(held[0], held[1])):
        bad.append(f"{held[1]} bytes of buffers, gathered {held[0]}")
    assert_all(comm, not bad, "; ".join(bad))


def differ(one, other, name):
    return one[name].tobytes() != other[name].tobytes()


@pytest.mark.multirank
@several
def test_two_plans_at_once(comm, grid_of):
    """A streamed and a gathered plan on one grid are called in turn."""
    grid, bad = grid_of(*GRIDS[-1]), []
    sizes = {"seqlen": 101, "nheads": NHEADS, "headdim": 16}
    plans = [Attention2D(grid, Causal(), stream=x, **sizes) for x in (True, False)]
    for _ in range(2):
        for plan in plans:
            found = run(plan, *inputs(101, NHEADS, 16))
            bad += failures(plan, found, plan.mask, 101, NHEADS, 16)
    for plan in plans:
        bad += accounts(plan, True, calls=2)
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.multirank
@several
def test_arguments(comm, grid_of):
    grid = grid_of(*GRIDS[0])
    sizes = {"seqlen": 9, "nheads": 1, "headdim": 8}
    with pytest.raises(ValueError, match="stream must be true or false, got 'yes'"):
        Attention2D(grid, Causal(), stream="yes", **sizes)
    with pytest.raises(ValueError, match="stream"):
        Attention2D(grid, Causal(), stream=comm.rank > 0, **sizes)


def programs(rows, cols, mask, phase, overlap, nheads_kv=4):
    layout = Layout(rows, cols, stream=True)
    work = Workload(rows * cols * 8 + 3, 4, 8, nheads_kv, mask=mask)
    problem = problem_of("attention2d", layout, work, mask)
    ranks = range(layout.size)
    return [write("attention2d", phase, layout, problem, x, overlap)[0] for x in ranks]


def shared_too_early(program):
    """Return arrays that share a buffer while both are in use."""
    used, messages = {}, {}
    for at, step in enumerate(program.steps):
        rows = [x for x in step if isinstance(x, Rows)]
        if isinstance(step, Send | Receive):
            messages[step.index] = step.rows
        elif isinstance(step, Wait):
            rows = [messages[x] for x in step.messages]
        for name in {x.array for x in rows}:
            used.setdefault(name, [at, at])[1] = at
    rooms = {}
    for name, span in sorted(used.items(), key=lambda x: x[1]):
        rooms.setdefault(program.arrays[name].room, []).append((*span, name))
    return [(a, b) for x in rooms.values() for a, b in zip(x, x[1:]) if a[1] >= b[0]]


def stuck(written):
    """Return the ranks that never end if every send waits for its receive."""
    at, posted = [0] * len(written), set()

    def key(rank, program, x):
        ends = (rank, x.peer) if isinstance(x, Send) else (x.peer, rank)
        return *ends, program.arrays[x.rows.array].kind, x.tag, x.turn

    messages = [{x.index: x for x in p.steps if isinstance(x, Send | Receive)} for p in written]
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(written):
            while at[rank] < len(program.steps):
                step = program.steps[at[rank]]
                if isinstance(step, Send | Receive):
                    posted.add((isinstance(step, Send), *key(rank, program, step)))
                elif isinstance(step, Wait):
                    keys = [key(rank, program, messages[rank][x]) for x in step.messages]
                    if not all((x, *y) in posted for x in (True, False) for y in keys):
                        break
                at[rank] += 1
                moving = True
    return [rank for rank, program in enumerate(written) if at[rank] < len(program.steps)]


MASKS = [
    Causal(),
    Full(),
    SlidingWindow(9, 0),
    Documents([0, 3, 40, 41, 59]) & SlidingWindow(30, 4),
]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mask", MASKS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("shape", [(4, 4), (2, 5), (5, 2), (1, 7), (7, 1), (3, 6)], ids=str)
def test_buffers_are_free_and_no_rank_is_stuck(shape, mask, overlap):
    for phase, nheads_kv in (("forward", 4), ("backward", 4), ("backward", 1)):
        written = programs(*shape, mask, phase, overlap, nheads_kv)
        assert not any(map(shared_too_early, written))
        assert not stuck(written)


def test_one_buffer_is_too_few(monkeypatch):
    """Wrong variants fail: one buffer for two shards, and an order that locks."""
    array = collectives.Program.array

    def one_buffer(self, *given, room="", **others):
        return array(self, *given, room=room.replace(" 1", " 0"), **others)

    with monkeypatch.context() as patched:
        patched.setattr(collectives.Program, "array", one_buffer)
        assert any(map(shared_too_early, programs(4, 4, Full(), "forward", True)))
        assert any(map(shared_too_early, programs(4, 4, Full(), "backward", True)))

    class Forwards(collectives.Stream):
        def __init__(self, *given, backwards=False):
            super().__init__(*given)

    monkeypatch.setattr(attention2d, "Stream", Forwards)
    assert stuck(programs(6, 6, Full(), "forward", True))


def test_planner_streams_when_memory_is_short():
    """The planner streams only plans that do not fit otherwise."""
    machine, methods = read_machine("data/machines/a100-16x4.toml"), ("attention2d",)
    work = Workload(1 << 16, 1, 64, mask=Causal(), backward=True)
    free = best_candidate(machine, 16, work, methods=methods)
    room = machine.reserved + free.memory // 2
    found = candidates(machine, 16, work, room, methods)
    best = found[0]
    assert not free.layout.stream
    assert best.layout.stream
    problem = problem_of("attention2d", best.layout, work, work.mask)
    assert most_memory("attention2d", best.layout, problem, True) == best.memory
    assert best.memory <= free.memory // 2
    gathered = {x.layout for x in found if not x.fits and not x.layout.stream}
    streamed = {replace(x.layout, stream=False) for x in found if x.layout.stream}
    assert streamed == gathered
    with pytest.raises(ValueError, match="no plan fits"):
        best_candidate(machine, 16, work, machine.reserved + 1, methods)
