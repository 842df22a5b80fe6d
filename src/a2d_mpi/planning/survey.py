"""The operations, messages and memory of all ranks of a plan, read from their programs.

A program is read once, into a `Tape`, for all ranks that run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.config import OF_KEYS, PHASES
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import NOTHING, Held, held_by
from a2d_mpi.planning.simulator import COMPUTE, MERGE, OTHER, POST, WAIT, Messages, Operations
from a2d_mpi.schedules import Draft, drafts_of, essence
from a2d_mpi.schedules.accounts import mpi_messages, nbytes, pairs_of
from a2d_mpi.schedules.problem import Problem, Workload
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import (
    KINDS,
    Barrier,
    Clear,
    KernelCall,
    Merge,
    Message,
    Receive,
    Send,
    Wait,
)

_KINDS = {kind: i for i, kind in enumerate(KINDS)}
_BARRIER = len(KINDS)  # kind of the empty messages of a barrier


class Tape(NamedTuple):
    """Operations of one program, whose messages are numbered from 0.

    Attributes
    ----------
    kind, seconds : ndarray
        Kind and seconds of each operation, see `a2d_mpi.planning.simulator.Operations`.
    sizes : ndarray
        Number of messages of each operation.
    numbers : ndarray
        Messages of the operations, one operation after the other.
    messages : (messages, 8) int64
        Peer, whether it is received, kind of rows, tag, turn, bytes, tensors, MPI messages.
    held : Held
    """

    kind: np.ndarray
    seconds: np.ndarray
    sizes: np.ndarray
    numbers: np.ndarray
    messages: np.ndarray
    held: Held


class Survey(NamedTuple):
    """Operations, messages and memory of all ranks of a plan in one phase.

    Attributes
    ----------
    operations : Operations
    messages : Messages
    tensors : (n,) int64
        Tensors of every message; each tensor costs the overhead of a message.
    pieces : (n,) int64
        MPI messages of every message; 0 for the empty messages of barriers.
    kinds : (n,) int64
        Index in `KINDS` of the rows of every message; ``len(KINDS)`` for messages of barriers.
    held : list of list of Held
        Memory, by rank and program.
    """

    operations: Operations
    messages: Messages
    tensors: np.ndarray
    pieces: np.ndarray
    kinds: np.ndarray
    held: list[list[Held]]


def survey_of(
    machine: Machine,
    method: str,
    layout: Layout,
    work: Workload,
    problem: Problem,
    phase: str,
    ranks: tuple[int, ...] | None = None,
    steps: int | None = None,
) -> Survey:
    """Read the programs of all ranks of a plan in one phase.

    Parameters
    ----------
    machine : Machine
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    layout : Layout
    work : Workload
    problem : Problem
        With all ranks of the layout and all heads.
    phase : {"forward", "backward"}
    ranks : tuple of int, optional
        Read the programs of these ranks only.  Their messages with other ranks are complete; the
        other ranks have nothing else.
    steps : int, optional
        Read only the first steps of every program, and waits for their messages.

    Raises
    ------
    ValueError
        If the heads do not fit the layout, or the machine has no kernel for the dtype.
    """
    plan = method, essence(method, layout), problem, work.overlap
    return _with_link_costs(machine, layout, _survey(machine, *plan, phase, ranks, steps))


@lru_cache(maxsize=2)  # layouts that differ only in the places of ranks follow each other
def _survey(
    machine: Machine,
    method: str,
    layout: Layout,
    problem: Problem,
    overlap: bool,
    phase: str,
    ranks: tuple[int, ...] | None,
    steps: int | None,
) -> Survey:
    """Make the survey without the costs of messages, which depend on the places of ranks."""
    tapes, places, held = [], [], []
    for rank in range(layout.size) if ranks is None else ranks:
        parts = drafts_of(method, phase, layout, problem, rank, overlap)
        mine = [_tape(x.anywhere, phase, machine, x == parts[-1], steps) for x in parts]
        held.append([x.held for x in mine])
        tapes += [_opening(machine, _opening_bytes(problem, rank, phase == PHASES[1])), *mine]
        places += [(rank, 0, 1, 0), *((rank, i, x.stride, x.offset) for i, x in enumerate(parts))]
    operations, listed = _joined(tapes, np.array(places), layout.size)
    source, to, nbytes, *others = listed.T
    return Survey(operations, Messages(source, to, nbytes), *others, held)


def _with_link_costs(machine: Machine, layout: Layout, survey: Survey) -> Survey:
    """Add the costs of messages on a machine's links to a survey.

    Posting a message costs the overhead of its link for each tensor.  Receiving it takes the core
    for ``1 - hidden`` of the transfer.
    """
    messages, operations = survey.messages, survey.operations
    node = machine.node_of(layout)
    near = node[messages.source] == node[messages.to]
    inside, between = machine.links(layout.size)

    def of_link(name: str) -> np.ndarray:
        return np.where(near, getattr(inside, name), getattr(between, name))

    overhead = survey.tensors * of_link("overhead")
    work = (1 - of_link("hidden")) * messages.nbytes / of_link("bandwidth")
    number, operation = operations.numbers, operations.operation
    received = messages.to[number] == operations.rank[operation]
    posts = operations.kind[operation] == POST
    costs = np.where(posts, overhead[number], work[number] * received)
    seconds = operations.seconds + np.bincount(operation, costs, len(operations.kind))
    return survey._replace(operations=operations._replace(seconds=seconds))


def _joined(
    tapes: Sequence[Tape], places: np.ndarray, ranks: int
) -> tuple[Operations, np.ndarray]:
    """Join the tapes of all ranks; the two sides of a message get the same number.

    Parameters
    ----------
    tapes : sequence of Tape
        One rank after the other.
    places : (tapes, 4) int64
        Rank, number of the program, and stride and offset of the ranks of its group.
    ranks : int
        Number of ranks.

    Returns
    -------
    operations : Operations
    messages : (n, 6) int64
        Source, receiver, bytes, tensors, MPI messages, kind.
    """
    kind, seconds, sizes, numbers, messages = map(np.concatenate, list(zip(*tapes))[:5])
    of_tape = np.array([[len(x.kind), len(x.numbers), len(x.messages)] for x in tapes])
    before = np.cumsum(of_tape[:, 2]) - of_tape[:, 2]
    numbers += np.repeat(before, of_tape[:, 1])
    rank, program, stride, offset = np.repeat(places, of_tape[:, 2], axis=0).T
    peer, receives, *same, nbytes, tensors, pieces = messages.T
    peer = peer * stride + offset
    ends = np.where(receives, peer, rank), np.where(receives, rank, peer)
    # These numbers are the same on both sides of a message, and differ between messages.
    columns = (program, *ends, *same)
    shape = [int(x.max(initial=0)) + 1 for x in columns]
    key = np.ravel_multi_index(columns, shape)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    operations = Operations(
        np.concatenate([[0], np.cumsum(np.bincount(places[:, 0], of_tape[:, 0], ranks))]).astype(
            np.int64
        ),
        kind,
        seconds,
        np.concatenate([[0], np.cumsum(sizes)]),
        number[numbers],
    )
    return operations, np.stack([*ends, nbytes, tensors, pieces, same[0]], axis=1)[first]


def _tape_of(
    operations: Sequence[tuple[int, float, Sequence[int]]],
    messages: Sequence[tuple[int, ...]],
    held: Held,
) -> Tape:
    kind, seconds, numbers = zip(*operations) if operations else ((), (), ())
    return Tape(
        np.array(kind, np.int64),
        np.array(seconds, float),
        np.array([len(x) for x in numbers], np.int64),
        np.array([m for x in numbers for m in x], np.int64),
        np.array(messages, np.int64).reshape(-1, 8),
        held,
    )


def _opening_bytes(problem: Problem, rank: int, backward: bool) -> int:
    """Return the bytes read to compute delta and, twice, to round tensors for the wire."""
    config, own = problem.config, (problem.shards.counts[rank], problem.shards_kv.counts[rank])
    names = ("q", "k", "v", "dout") if backward else ("q", "k", "v")
    rounded = (own[x in OF_KEYS] * config.nbytes(x) * config.rounds(x) for x in names)
    return 2 * sum(rounded) + 2 * own[0] * config.nbytes("out") * backward


@lru_cache(maxsize=64)
def _opening(machine: Machine, nbytes: int) -> Tape:
    """Make the tape of a call's opening: its start, and work on the caller's arrays."""
    spent = [(OTHER, machine.start, ()), (COMPUTE, machine.copying(nbytes), ())]
    return _tape_of([x for x in spent if x[1]], (), NOTHING)


@lru_cache(maxsize=4096)
def _tape(part: Draft, phase: str, machine: Machine, last: bool, steps: int | None) -> Tape:
    """Read one program, or its first steps; `last`: its results are for the caller."""
    program, backward = part.write(steps), phase == PHASES[1]
    calls, config = iter(_kernel_seconds(program, machine, phase)), program.group.config
    awaited = _awaited_sends(program)
    operations: list[tuple[int, float, Sequence[int]]] = []
    messages: list[tuple[int, ...]] = []
    numbers: dict[int, range] = {}  # messages of the tape, by index of the program's
    posted: list[int] = []
    for step in program.steps:
        is_message = isinstance(step, Message)
        if is_message or isinstance(step, Barrier):
            new = [_message(program, step)] if is_message else _barrier(program, step)
            numbers[step.index] = range(len(messages), len(messages) + len(new))
            messages += new
            posted += numbers[step.index]
            if step.index not in awaited:
                continue
        if posted:  # messages that are posted together leave together
            operations.append((POST, 0.0, posted))
            posted = []
        if is_message:
            operations.append((OTHER, machine.hop_overhead / machine.share, ()))
        elif isinstance(step, Wait):
            operations.append((WAIT, 0.0, [m for index in step.messages for m in numbers[index]]))
        elif isinstance(step, KernelCall):
            operations.append((COMPUTE, next(calls), ()))
            operations.append((OTHER, machine.step / machine.share, ()))
        elif isinstance(step, Merge):
            size = step.source.count * config.nbytes("dq", accumulated=True)
            operations.append((MERGE, size / machine.merge / machine.share, ()))
        elif isinstance(step, Clear):
            operations.append((OTHER, machine.copying(nbytes(program, step.rows)), ()))
        else:  # Copy or Add
            operations.append((MERGE, machine.copying(nbytes(program, step.source)), ()))
    for rows in program.copied if last else ():
        operations.append((OTHER, machine.copying(nbytes(program, rows)), ()))
    timed = [x for x in operations if x[0] in (POST, WAIT) or x[1]]
    return _tape_of(timed, messages, held_by(program, backward, machine.host_kernel(config.dtype)))


def _message(program: Program, step: Message) -> tuple[int, ...]:
    """Return the row of `Tape.messages` of a message."""
    array = program.arrays[step.rows.array]
    # Equal on both sides; two ranks share one channel.
    same = _KINDS[array.kind], step.tag, step.turn
    sizes = nbytes(program, step.rows), len(program.group.row_bytes(array))
    pieces = mpi_messages(program, step.rows)
    return step.peer, isinstance(step, Receive), *same, *sizes, pieces


def _barrier(program: Program, step: Barrier) -> list[tuple[int, ...]]:
    """Return the rows of `Tape.messages` of a barrier: an empty message with each other rank.

    A message has passed when both ranks have posted it.  MPI needs fewer messages, which ranks
    forward to each other (dissemination), so only this smaller number has an overhead.  A channel
    has one barrier at most.
    """
    others = [x for x in program.channels[step.channel] if x != program.rank]
    rounds = len(others).bit_length()
    return [
        (x, x < program.rank, _BARRIER, 0, 0, 0, int(i < rounds), 0) for i, x in enumerate(others)
    ]


def _kernel_seconds(program: Program, machine: Machine, phase: str) -> list[float]:
    """Return the seconds of every kernel call of a program."""
    calls = [x for x in program.steps if isinstance(x, KernelCall)]
    if not calls:
        return []
    area, cut = pairs_of(program, calls)
    nq, nk = (np.array([x[i].count for x in calls]) for i in range(2))  # queries, keys
    config = program.group.config
    heads = config.nheads, config.nheads_kv, config.headdim, config.headdim_v
    kernel = machine.kernel(config.dtype, phase)
    seconds = kernel.seconds(area, nq, nk, cut, heads, phase == PHASES[1])
    return (seconds / machine.share).tolist()


def _awaited_sends(program: Program) -> set[int]:
    """Return the indices of the sends that make a rank keep pace with its peers.

    The rank waits for the end of such a send after at most one kernel call.  Waits at the end of a
    program do not count.
    """
    awaited, calls, posted = set(), 0, {}
    for step in program.steps[: program.body]:
        if isinstance(step, KernelCall):
            calls += 1
        elif isinstance(step, Send):
            posted[step.index] = calls
        elif isinstance(step, Wait):
            awaited |= {x for x in step.messages if posted.get(x, -2) >= calls - 1}
    return awaited
