"""Clock and links of ranks whose schedules differ, event by event.

`a2d_mpi.planning.clock` goes through one schedule for all ranks at once, which needs the same
steps on all of them.  Here every rank has a program of its own: busy times, messages and waits,
written down first, then run together in the order of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.clock import PARTS, Spans, record
from a2d_mpi.planning.machine import Machine
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import Span, chunk_of
from a2d_mpi.schedules.steps import Message


@dataclass(eq=False)
class Transfer:
    """A message, known to its sender and its receiver.

    Attributes
    ----------
    source, to : int
        Logical ranks.
    nbytes : int
    posted : int
        How many of both sides have posted it.
    ready : float
        When the later of them did.
    done : float or None
        When it has arrived; None: not known yet.
    waiting : list of int
        Ranks that wait for it.
    """

    source: int
    to: int
    nbytes: int
    posted: int = 0
    ready: float = 0.0
    done: float | None = None
    waiting: list[int] = field(default_factory=list)


class Program:
    """All that one rank does, as `Links` and `Clock.spend` take it."""

    def __init__(self, events: Events, rank: int) -> None:
        self._events, self._rank = events, rank
        self.steps: list[tuple] = []
        self._chain = -1  # schedules so far, but for one

    def spend(self, part: str, seconds: float) -> None:
        """This rank is busy."""
        if seconds:
            self.steps.append(("spend", part, seconds))

    def begin(self, schedule: Schedule, nbytes: dict[Message, int]) -> None:
        """Set out on a schedule, with the bytes of each message."""
        self._schedule, self._nbytes = schedule, nbytes
        self._transfers: dict[Message, Transfer] = {}
        self._batch: list[Transfer] = []
        self._overheads = 0.0
        self._chain += 1

    def post(self, message: Message, tensors: int) -> None:
        """Post a message of so many tensors, which leaves with those posted next."""
        schedule, rows = self._schedule, message.rows
        peer = schedule.logical(message.peer)
        ends = (self._rank, peer) if message.sent else (peer, self._rank)
        kind, part = schedule.arrays[rows.array].kind, rows.part
        part = part if isinstance(part, Span) else chunk_of(part)
        owner = schedule.logical(rows.owner)
        key = (self._chain, *ends, message.tag, kind, owner, part)
        transfer = self._events.transfer(key, *ends, self._nbytes[message])
        self._transfers[message] = transfer
        self._batch.append(transfer)
        self._overheads += tensors * self._events.link(*ends).overhead

    def depart(self) -> None:
        """Let the messages leave that were posted since the last time."""
        if self._batch:
            self.spend("other", self._overheads)
            self.steps.append(("depart", self._batch))
            self._batch, self._overheads = [], 0.0

    def wait(self, messages: Sequence[Message]) -> None:
        """Wait for messages."""
        self.depart()
        self.steps.append(("wait", [self._transfers.pop(x) for x in messages], True))

    def finish(self) -> None:
        """Wait until all that is sent has left."""
        self.depart()
        sent = [transfer for message, transfer in self._transfers.items() if message.sent]
        if sent:
            self.steps.append(("wait", sent, False))


class Events:
    """The programs of all ranks, and the links between them.

    A message leaves when both sides have posted it.  What a rank sends inside its node, and what
    it receives there, follow each other; so do its messages to other nodes, and all of a node's,
    which share its NICs.

    Parameters
    ----------
    machine : Machine
    layout : Layout
    spans : list of Spans, optional
        Gets everything, by rank.

    Attributes
    ----------
    programs : dict of int to Program
        By logical rank.
    """

    def __init__(self, machine: Machine, layout: Layout, spans: list[Spans] | None = None) -> None:
        self._size, self._spans = layout.size, spans
        self._node = (layout.physical() // machine.ranks_per_node).tolist()
        self._links = machine.links(layout.size)
        between = self._links[1]
        self._alone = between.bandwidth * max(1.0, between.nics / machine.ranks_per_node)
        self.programs: dict[int, Program] = {}
        self._transfers: dict[tuple, Transfer] = {}
        self._free: dict[tuple, float] = {}

    def program(self, rank: int) -> Program:
        """A new program for a logical rank."""
        self.programs[rank] = Program(self, rank)
        return self.programs[rank]

    def link(self, source: int, to: int):
        """The link between two ranks."""
        return self._links[self._node[source] != self._node[to]]

    def transfer(self, key: tuple, source: int, to: int, nbytes: int) -> Transfer:
        """The message that both of its sides know by a key."""
        if key not in self._transfers:
            self._transfers[key] = Transfer(source, to, nbytes)
        return self._transfers[key]

    def work(self, rank: int, transfers: list[Transfer]) -> float:
        """Seconds of a rank's core that what it receives takes."""
        return sum(
            (1 - link.hidden) * x.nbytes / link.bandwidth
            for x in transfers
            for link in [self.link(x.source, x.to)]
            if x.to == rank
        )

    def run(self) -> dict[str, np.ndarray]:
        """Run all programs together; returns the seconds of each part, (P,) float64."""
        self._parts = {part: [0.0] * self._size for part in PARTS}
        self._idle = [0.0] * self._size
        left = {rank: iter(program.steps) for rank, program in self.programs.items()}
        step = {rank: next(steps, None) for rank, steps in left.items()}
        self._now = [0.0] * self._size
        self._queue = [(0.0, rank) for rank in left]
        while self._queue:
            _, rank = heappop(self._queue)
            while step[rank] is not None and self._do(rank, *step[rank]):
                step[rank] = next(left[rank], None)
                if self._queue and self._queue[0][0] < self._now[rank]:
                    heappush(self._queue, (self._now[rank], rank))
                    break
        stuck = [rank for rank, what in step.items() if what is not None]
        assert not stuck, f"ranks {stuck} wait for ever"
        return {part: np.array(seconds) for part, seconds in self._parts.items()}

    def _do(self, rank: int, what: str, *operands) -> bool:
        """Do a step of a rank, if it need not wait for one that is not known yet."""
        if what == "spend":
            self._go(rank, operands[0], self._now[rank] + operands[1])
        elif what == "depart":
            for transfer in operands[0]:
                self._post(transfer, self._now[rank])
        else:
            missing = next((x for x in operands[0] if x.done is None), None)
            if missing is not None:
                missing.waiting.append(rank)
                return False
            self._wait(rank, *operands)
        return True

    def _go(self, rank: int, part: str, to: float) -> None:
        self._parts[part][rank] += to - self._now[rank]
        if self._spans is not None:
            record(self._spans[rank], part, self._now[rank], to)
        self._now[rank] = to

    def _wait(self, rank: int, transfers: list[Transfer], arriving: bool) -> None:
        """Wait for messages, working for those that arrive where nothing else takes its time."""
        now = self._now[rank]
        ready = max(now, max(x.done for x in transfers))
        self._idle[rank] += ready - now
        if arriving:
            work = self.work(rank, transfers)
            paid = min(self._idle[rank], work)
            self._idle[rank] -= paid
            ready += work - paid
        self._go(rank, "wait", ready)

    def _post(self, x: Transfer, now: float) -> None:
        x.posted, x.ready = x.posted + 1, max(x.ready, now)
        if x.posted < 2:
            return
        x.done = x.ready
        for queue, bandwidth in self._queues(x):
            end = max(self._free.get(queue, 0.0), x.ready) + x.nbytes / bandwidth
            self._free[queue] = end
            x.done = max(x.done, end)
        x.done += self.link(x.source, x.to).latency
        for rank in x.waiting:
            heappush(self._queue, (max(self._now[rank], now), rank))
        x.waiting = []

    def _queues(self, x: Transfer) -> Iterator[tuple[tuple, float]]:
        """All that a message has to pass, and the bytes/s there."""
        link, nodes = self.link(x.source, x.to), (self._node[x.source], self._node[x.to])
        if nodes[0] == nodes[1]:
            yield ("out", x.source), link.bandwidth
            yield ("in", x.to), link.bandwidth
        else:
            yield ("out, far", x.source), self._alone
            yield ("in, far", x.to), self._alone
            yield ("out of", nodes[0]), link.bandwidth * link.nics
            yield ("into", nodes[1]), link.bandwidth * link.nics
