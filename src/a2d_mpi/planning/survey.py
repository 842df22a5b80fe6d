"""The operations, messages and memory of all ranks of a plan, read from their programs.

A program is read once, into a `Tape`, for all ranks that run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.config import OF_KEYS, PHASES
from a2d_mpi.core.layout import Layout
from a2d_mpi.planning.cost import nbytes, pairs_of
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import NOTHING, Needs, needs_of, needs_of_slices
from a2d_mpi.planning.simulator import COMPUTE, MERGE, OTHER, POST, WAIT, Messages, Operations
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.pipeline import borders, order
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import (
    KINDS,
    Clear,
    Drain,
    KernelCall,
    Merge,
    Message,
    Receive,
    Send,
    TakeHeads,
    Wait,
)
from a2d_mpi.schedules.writing import Draft, drafts_of

_KINDS = {kind: i for i, kind in enumerate(KINDS)}


# Operations of a part of a program: kind and seconds of each, the number of its messages, and the
# messages, one operation after the other.
Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Tape(NamedTuple):
    """Operations of one program, whose messages are numbered from 0.

    Attributes
    ----------
    parts : list of Part
        See `a2d_mpi.schedules.pipeline.borders`.
    messages : (messages, 7) int64
        Peer, whether it is received, kind of rows, tag, turn, bytes, tensors.
    needs : Needs
    """

    parts: list[Part]
    messages: np.ndarray
    needs: Needs


class Survey(NamedTuple):
    """Operations, messages and memory of all ranks of a plan in one phase.

    Attributes
    ----------
    operations : Operations
    messages : Messages
    needs : list of list of Needs
        Memory, by rank and program.
    """

    operations: Operations
    messages: Messages
    needs: list[list[Needs]]


def survey_of(
    machine: Machine,
    method: str,
    layout: Layout,
    work: Workload,
    problem: Problem,
    phase: str,
    ranks: tuple[int, ...] | None = None,
) -> Survey:
    """Read the programs of all ranks of a plan in one phase.

    Parameters
    ----------
    machine : Machine
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    layout : Layout
    work : Workload
    problem : Problem
        With all ranks of the layout and all heads.
    phase : {"forward", "backward"}
    ranks : tuple of int, optional
        Read the programs of these ranks only.  Their messages with other ranks are complete; the
        other ranks have nothing else.

    Raises
    ------
    ValueError
        If the heads do not fit the layout, or the machine has no kernel for the dtype.
    """
    plan = method, essence(method, layout), problem, work.overlap
    survey = _survey(machine, *plan, phase, ranks)
    # Posting a message costs the overhead of its link for each tensor.  Receiving it takes the
    # core for ``1 - hidden`` of the transfer.
    messages, operations = survey.messages, survey.operations
    node = machine.node_of(layout)
    near = node[messages.source] == node[messages.to]
    inside, between = machine.links(layout.size)

    def of_link(name: str) -> np.ndarray:
        return np.where(near, getattr(inside, name), getattr(between, name))

    overhead = messages.tensors * of_link("overhead")
    receiving = (1 - of_link("hidden")) * messages.nbytes / of_link("bandwidth")
    number, operation = operations.numbers, operations.operation
    received = messages.to[number] == operations.rank[operation]
    posts = operations.kind[operation] == POST
    costs = np.where(posts, overhead[number], receiving[number] * received)
    seconds = operations.seconds + np.bincount(operation, costs, len(operations.kind))
    return survey._replace(operations=operations._replace(seconds=seconds))


@lru_cache(maxsize=2)  # layouts that differ only in the places of ranks follow each other
def _survey(
    machine: Machine,
    method: str,
    layout: Layout,
    problem: Problem,
    overlap: bool,
    phase: str,
    ranks: tuple[int, ...] | None,
) -> Survey:
    """Make the survey without the costs of messages, which depend on the places of ranks."""
    tapes, places, parts, needs = [], [], [], []
    for rank in range(layout.size) if ranks is None else ranks:
        parts.append((len(tapes), 0))
        tapes.append(_opening(machine, problem, rank, phase == PHASES[1]))
        places.append((rank, 0, 1, 0))
        drafts, slices = drafts_of(method, phase, layout, problem, rank, overlap)
        first, programs = len(tapes), len(drafts)
        own = [_tape(x, phase, machine, x is drafts[-1]) for x in drafts]
        tapes += own * slices
        needs.append(needs_of_slices([x.needs for x in own], slices, layout))
        run = product([0], range(programs), range(3))
        if slices > 1:
            run = order(layout, slices, overlap)
        parts += [(first + i * programs + k, part) for i, k, part in run]
        places += [(rank, i, x.ranks.step, x.ranks.start) for i, x in enumerate(drafts * slices)]
    return Survey(*_joined(tapes, np.array(places), parts, layout.size), needs)


def _joined(
    tapes: Sequence[Tape],
    places: np.ndarray,
    parts: Sequence[tuple[int, int]],
    ranks: int,
) -> tuple[Operations, Messages]:
    """Join the tapes of all ranks; the two sides of a message get the same number.

    Parameters
    ----------
    tapes : sequence of Tape
    places : (tapes, 4) int64
        Rank, number of the program, and stride and offset of the ranks of its group.
    parts : sequence of (int, int)
        What is run, rank by rank: numbers of tapes, and of their parts.
    ranks : int
        Number of ranks.
    """
    pieces = [tapes[i].parts[part] for i, part in parts]
    kind, seconds, sizes, numbers = map(np.concatenate, zip(*pieces))
    messages = np.concatenate([x.messages for x in tapes])
    of_tape = np.array([len(x.messages) for x in tapes])
    tape = np.array([i for i, _ in parts])
    before = np.cumsum(of_tape) - of_tape
    numbers += np.repeat(before[tape], [len(x) for *_, x in pieces])
    rank, program, stride, offset = np.repeat(places, of_tape, axis=0).T
    peer, receives, *same, nbytes, tensors = messages.T
    peer = peer * stride + offset
    ends = np.where(receives, peer, rank), np.where(receives, rank, peer)
    # These numbers are the same on both sides of a message, and differ between messages.
    columns = (program, *ends, *same)
    shape = [int(x.max(initial=0)) + 1 for x in columns]
    key = np.ravel_multi_index(columns, shape)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    of_rank = np.bincount(places[tape, 0], [len(x) for x, *_ in pieces], ranks)
    operations = Operations(
        np.concatenate([[0], np.cumsum(of_rank)]).astype(np.int64),
        kind,
        seconds,
        np.concatenate([[0], np.cumsum(sizes)]),
        number[numbers],
    )
    return operations, Messages(*(x[first] for x in (*ends, nbytes, tensors)))


def _tape_of(
    parts: Sequence[Sequence[tuple[int, float, Sequence[int]]]],
    messages: Sequence[tuple[int, ...]],
    needs: Needs,
) -> Tape:
    """Make a tape; `parts` are kind, seconds and messages of the operations of each part."""
    columns = []
    for operations in parts:
        kind, seconds, numbers = zip(*operations) if operations else ((), (), ())
        sizes, listed = [len(x) for x in numbers], [m for x in numbers for m in x]
        columns.append((
            np.array(kind, np.int64), np.array(seconds, float),
            np.array(sizes, np.int64), np.array(listed, np.int64),
        ))  # fmt: skip
    return Tape(columns, np.array(messages, np.int64).reshape(-1, 7), needs)


def _opening(machine: Machine, problem: Problem, rank: int, backward: bool) -> Tape:
    """Make the tape of a call's opening: its start, and work on the caller's arrays.

    The rank computes delta and, reading twice, rounds tensors for the wire.
    """
    config, own = problem.config, (problem.queries.counts[rank], problem.keys.counts[rank])
    names = ("q", "k", "v", "dout") if backward else ("q", "k", "v")
    rounded = (own[x in OF_KEYS] * config.nbytes(x) * config.rounds(x) for x in names)
    size = 2 * sum(rounded) + 2 * own[0] * config.nbytes("out") * backward
    spent = [(OTHER, machine.start, ()), (COMPUTE, machine.copying(size), ())]
    return _tape_of([[x for x in spent if x[1]]], (), NOTHING)


@lru_cache(maxsize=4096)
def _tape(draft: Draft, phase: str, machine: Machine, last: bool) -> Tape:
    """Read one program; `last`: its results are for the caller."""
    program = draft.write()
    calls, config = iter(_kernel_seconds(program, machine, phase)), program.group.config
    awaited = _awaited_sends(program)
    parts: list[list[tuple[int, float, Sequence[int]]]] = [[]]
    messages: list[tuple[int, ...]] = []
    numbers: dict[int, int] = {}  # messages of the tape, by index of the program's
    posted: list[int] = []
    bounds = borders(program)

    def spend(kind: int, seconds: float) -> None:
        if seconds:
            parts[-1].append((kind, seconds, ()))

    def post() -> None:  # messages that are posted together leave together
        nonlocal posted
        if posted:
            parts[-1].append((POST, 0.0, posted))
            posted = []

    for i, step in enumerate(program.steps):
        for _ in range(bounds.count(i)):
            post()
            parts.append([])
        is_message = isinstance(step, Message)
        if is_message:
            numbers[step.index] = len(messages)
            posted.append(len(messages))
            messages.append(_message(program, step))
            if step.index not in awaited:
                continue
        post()
        if is_message:
            spend(OTHER, machine.hop_overhead / machine.share)
        elif isinstance(step, Wait):
            parts[-1].append((WAIT, 0.0, [numbers[x] for x in step.messages]))
        elif isinstance(step, KernelCall):
            spend(COMPUTE, next(calls))
            spend(OTHER, machine.step / machine.share)
        elif isinstance(step, Merge):
            size = step.source.count * config.nbytes("dq", accumulated=True)
            spend(MERGE, size / machine.merge / machine.share)
        elif isinstance(step, Clear):
            spend(OTHER, machine.copying(nbytes(program, step.rows)))
        else:
            rows = step.target if isinstance(step, TakeHeads) else step.source
            spend(MERGE, machine.copying(nbytes(program, rows)))
    parts += ([] for _ in range(3 - len(parts)))
    for rows in program.copied if last else ():
        spend(OTHER, machine.copying(nbytes(program, rows)))
    return _tape_of(parts, messages, needs_of(program))


def _message(program: Program, step: Message) -> tuple[int, ...]:
    """Return the row of `Tape.messages` of a message."""
    array = program.arrays[step.rows.array]
    # Equal on both sides; two ranks share one channel.
    same = _KINDS[array.kind], step.tag, step.turn
    sizes = nbytes(program, step.rows), len(program.group.row_bytes(array))
    return step.peer, isinstance(step, Receive), *same, *sizes


def _kernel_seconds(program: Program, machine: Machine, phase: str) -> list[float]:
    """Return the seconds of every kernel call of a program."""
    calls = [x for x in program.steps if isinstance(x, KernelCall)]
    if not calls:
        return []
    area, cut = pairs_of(program, calls)
    queries, keys = ([x[i].count for x in calls] for i in range(2))
    config = program.group.config
    heads = config.nheads, config.nheads_kv, config.headdim, config.headdim_v
    kernel = machine.kernel(config.dtype, phase)
    of_calls = np.stack([area, queries, keys, cut])
    seconds = kernel.seconds(of_calls, heads, phase == PHASES[1])
    return (seconds / machine.share).tolist()


def _awaited_sends(program: Program) -> set[int]:
    """Return the indices of the sends that make a rank keep pace with its peers.

    The rank waits for the end of such a send after at most one kernel call.  Waits at the end of a
    program do not count.
    """
    awaited, calls, posted = set(), 0, {}
    for step in program.steps:
        if isinstance(step, KernelCall):
            calls += 1
        elif isinstance(step, Send):
            posted[step.index] = calls
        elif isinstance(step, Wait) and not isinstance(step, Drain):
            awaited |= {x for x in step.messages if posted.get(x, -2) >= calls - 1}
    return awaited


def essence(method: str, layout: Layout) -> Layout:
    """Return the layout with only the fields on which the method's programs depend."""
    chosen = METHODS[method]
    nodes = layout.nodes if chosen.knows_nodes else None
    return Layout(layout.rows, layout.cols, layout.heads, nodes=nodes, slices=layout.slices)
