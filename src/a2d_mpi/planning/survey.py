"""All ranks of a plan at once: what they do, send and hold, read off the program of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from a2d_mpi.core.pairs import pairs_of_runs
from a2d_mpi.core.problem import Problem, Workload
from a2d_mpi.core.sizes import MAX_MESSAGE, Layout
from a2d_mpi.planning.machine import KernelModel, Machine
from a2d_mpi.planning.memory import peak_of
from a2d_mpi.planning.simulator import Messages, Operation
from a2d_mpi.schedules import essence, write_each
from a2d_mpi.schedules.accounts import nbytes
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import (
    Add,
    Attend,
    Clear,
    Copy,
    Differentiate,
    Merge,
    Message,
    Receive,
    Rows,
    Send,
    Wait,
)

MESSAGES, CALLS = (Send, Receive), (Attend, Differentiate)


@dataclass(frozen=True)
class Rates:
    """The figures of one rank of a machine that do not depend on links; see `Machine`."""

    kernels: tuple[tuple[str, KernelModel], ...]
    host_kernel: str | None
    share: float
    start: float
    step: float
    turn: float
    copy: float
    merge: float

    @classmethod
    def of(cls, machine: Machine, dtype: str, phases: Sequence[str]) -> Rates:
        """The rates of a machine; ValueError if it has no kernel for the dtype."""
        kernels = tuple((phase, machine.kernel(dtype, phase)) for phase in phases)
        figures = ("share", "start", "step", "turn", "copy", "merge")
        return cls(kernels, machine.host_kernel(dtype), *(getattr(machine, x) for x in figures))


@dataclass(frozen=True)
class Survey:
    """What all ranks of a plan do, send and hold.

    Attributes
    ----------
    operations : dict of str to list of list of Operation
        By phase and rank; without the costs of messages, which depend on the places of ranks.
    messages : dict of str to Messages
        By phase.
    tensors : dict of str to (n,) int64
        By phase: tensors of every message, which each cost the overhead of a message.
    received : int
        MPI messages that the busiest rank receives, over all phases.
    memory : int
        Bytes that a rank holds at most; see `a2d_mpi.planning.memory.peak_memory`.
    """

    operations: dict[str, list[list[Operation]]]
    messages: dict[str, Messages]
    tensors: dict[str, np.ndarray]
    received: int
    memory: int


@lru_cache(maxsize=1)  # layouts that differ in the places of ranks follow each other
def survey(
    method: str,
    layout: Layout,
    problem: Problem,
    rates: Rates,
    overlap: bool,
    ranks: tuple[int, ...] | None = None,
) -> Survey:
    """Go through the programs of all ranks.

    Parameters
    ----------
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    layout : Layout
    problem : Problem
        With all ranks of the layout and all heads.
    rates : Rates
        Its phases are gone through.
    overlap : bool
    ranks : tuple of int, optional
        Only these ranks; messages between them and others are complete, but nothing else of the
        others is.
    """
    walks = {phase: _Walk(phase, kernel, rates, problem) for phase, kernel in rates.kernels}
    memory, surveyed = 0, range(layout.size) if ranks is None else ranks
    written = (write_each(method, x, layout, problem, surveyed, overlap) for x in walks)
    for rank, *phases in zip(surveyed, *written):
        for walk, programs in zip(walks.values(), phases):
            walk.go(rank, programs)
        memory = max(memory, peak_of(phases, problem, rank, rates.host_kernel))
    received = sum(np.array(_received(walk, layout.size)) for walk in walks.values())
    return Survey(
        {phase: walk.operations for phase, walk in walks.items()},
        {phase: walk.messages() for phase, walk in walks.items()},
        {phase: np.array(walk.columns[3], np.int64) for phase, walk in walks.items()},
        int(received.max()),
        memory,
    )


def survey_of(
    machine: Machine,
    method: str,
    layout: Layout,
    work: Workload,
    problem: Problem,
    ranks: tuple[int, ...] | None = None,
) -> Survey:
    """The survey of a plan on a machine; `ranks` as of `survey`.

    Raises
    ------
    ValueError
        If the heads do not fit the layout, or the machine has no kernel for the dtype.
    """
    rates = Rates.of(machine, work.dtype, work.phases)
    read = survey if ranks is None else _corners
    return read(method, essence(method, layout), problem, rates, work.overlap, ranks)


def programs_of(
    machine: Machine, method: str, layout: Layout, work: Workload, problem: Problem, phase: str
) -> tuple[list[list[Operation]], Messages]:
    """The operations of all ranks in one phase of a plan, and their messages."""
    return placed(machine, layout, survey_of(machine, method, layout, work, problem), phase)


def placed(
    machine: Machine, layout: Layout, found: Survey, phase: str
) -> tuple[list[list[Operation]], Messages]:
    """The operations of a phase with the costs of messages on a machine's links.

    Posting a message costs the overhead of its link for each tensor; receiving it costs the core
    ``1 - hidden`` of the transfer.
    """
    messages, node = found.messages[phase], layout.physical() // machine.ranks_per_node
    near = node[messages.source] == node[messages.to]
    inside, between = machine.links(layout.size)

    def of_link(name: str) -> np.ndarray:
        return np.where(near, getattr(inside, name), getattr(between, name))

    overhead = (found.tensors[phase] * of_link("overhead")).tolist()
    work = ((1 - of_link("hidden")) * messages.nbytes / of_link("bandwidth")).tolist()
    receivers, programs = messages.to.tolist(), []
    for rank, operations in enumerate(found.operations[phase]):
        programs.append(program := [])
        for operation in operations:
            if operation[0] == "post" and (seconds := sum(overhead[m] for m in operation[1])):
                program.append(("spend", "other", seconds))
            elif operation[0] == "wait":
                core = sum(work[m] for m in operation[1] if receivers[m] == rank)
                operation = *operation, core
            program.append(operation)
    return programs, messages


_corners = lru_cache(maxsize=1)(survey.__wrapped__)


def _received(walk: _Walk, ranks: int) -> np.ndarray:
    found = np.zeros(ranks, np.int64)
    np.add.at(found, walk.columns[1], walk.pieces)
    return found


class _Walk:
    """The operations and messages of one phase."""

    def __init__(self, phase: str, kernel: KernelModel, rates: Rates, problem: Problem) -> None:
        self._phase, self._kernel, self._rates, self._problem = phase, kernel, rates, problem
        self.operations: list[list[Operation]] = []
        self.columns: tuple[list[int], ...] = ([], [], [], [])
        self.pieces: list[int] = []  # MPI messages of each message
        self._numbers: dict[tuple, int] = {}
        self._timed: tuple[tuple | None, list[float]] = None, []

    def messages(self) -> Messages:
        """All messages, as columns."""
        return Messages(*(np.array(x, np.int64) for x in self.columns[:3]))

    def go(self, rank: int, programs: list[Program]) -> None:
        """Go through the programs of a rank."""
        self._now: list[Operation] = []
        self.operations.append(self._now)
        self._spend("other", self._rates.start)
        if self._phase == "backward":  # delta
            own = self._problem.counts[rank]
            self._spend("compute", self._copying(2 * own * self._problem.config.nbytes("q")))
        for place, program in enumerate(programs):
            self._steps(place, program)
        last = programs[-1]
        for rows in last.results.values():
            if last.arrays[rows.array].role == "buffer":  # the caller gets copies
                self._spend("other", self._copying(nbytes(last, rows)))

    def _spend(self, part: str, seconds: float) -> None:
        if seconds:
            self._now.append(("spend", part, float(seconds)))

    def _steps(self, place: int, program: Program) -> None:
        seconds = iter(self._kernel_seconds(program))
        keeping, numbers = _keeping_step(program), []
        posted: list[int] = []
        for step in program.steps:
            if isinstance(step, MESSAGES):
                numbers.append(self._number(place, program, step))
                posted.append(numbers[-1])
                if step.index not in keeping:
                    continue
            if posted:  # messages that are posted together leave together
                self._now.append(("post", posted))
                posted = []
            match step:
                case Send():
                    self._spend("other", self._rates.turn / self._rates.share)
                case Wait():
                    self._now.append(("wait", [numbers[x] for x in step.messages]))
                case Attend() | Differentiate():
                    self._spend("compute", next(seconds))
                    self._spend("other", self._rates.step / self._rates.share)
                case Merge():
                    self._spend("merge", self._merging(program, step.source))
                case Copy() | Add():
                    self._spend("merge", self._copying(nbytes(program, step.source)))
                case Clear():
                    self._spend("other", self._copying(nbytes(program, step.rows)))

    def _number(self, place: int, program: Program, step: Message) -> int:
        """Number of a message, which both sides know by the same key."""
        array, peer = program.arrays[step.rows.array], program.logical(step.peer)
        ends = (program.logical(program.rank), peer)
        if isinstance(step, Receive):
            ends = ends[::-1]
        key = place, *ends, array.kind, step.tag, step.turn  # two ranks share one channel
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            sizes = program.group.row_bytes(array)
            count = step.rows.count
            values = (*ends, count * sum(sizes), len(sizes))
            for column, value in zip(self.columns, values):
                column.append(value)
            self.pieces.append(sum(-(-count * x // MAX_MESSAGE) for x in sizes))
        return number

    def _kernel_seconds(self, program: Program) -> list[float]:
        """Seconds of every kernel call of a program; the ranks of a Ulysses group have one."""
        calls = [x for x in program.steps if isinstance(x, CALLS)]
        if not calls:
            return []
        key = program.rank, program.group
        if key == self._timed[0]:
            return self._timed[1]
        figures = []
        for x in calls:
            q, k = program.token_runs(x.queries), program.token_runs(x.keys)
            area, cut = pairs_of_runs(program.mask, q, k)
            figures.append((area, x.queries.count, x.keys.count, cut))
        config = program.group.config
        heads = config.nheads, config.nheads_kv, config.headdim
        backward = self._phase == "backward"
        seconds = self._kernel.seconds(*np.array(figures, float).T, heads, backward)
        self._timed = key, (seconds / self._rates.share).tolist()
        return self._timed[1]

    def _copying(self, size: float) -> float:
        """Seconds to copy, or to add, this many bytes."""
        return size / self._rates.copy / self._rates.share

    def _merging(self, program: Program, rows: Rows) -> float:
        """Seconds to merge a partial out."""
        size = rows.count * program.group.config.nbytes("dq", wide=True)
        return size / self._rates.merge / self._rates.share


def _keeping_step(program: Program) -> set[int]:
    """Indices of the sends that make a rank keep step with its peers.

    The rank waits until they have left, and does no more than one kernel call meanwhile.  The
    waits that end a program are no such waits.
    """
    found, calls, posted = set(), 0, {}
    for step in program.steps[: program.body]:
        if isinstance(step, CALLS):
            calls += 1
        elif isinstance(step, Send):
            posted[step.index] = calls
        elif isinstance(step, Wait):
            found |= {x for x in step.messages if posted.get(x, -2) >= calls - 1}
    return found
