"""Steps of all ranks in one phase, as numbers that a simulator reads; no simulator is needed.

The model's own walk (`a2d_mpi.planning.model`) writes it: where the model would move its clock,
`Tape` and `TapedLinks` write down that it should, for ranks that do the same steps; for others
there are their `Program`s (`a2d_mpi.planning.events`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.clock import PARTS, Links, Post
from a2d_mpi.planning.events import Events, Transfer
from a2d_mpi.planning.machine import Machine
from a2d_mpi.schedules.steps import Message


class Kind(IntEnum):
    """Kinds of steps; the simulator knows these numbers."""

    SPEND = 0
    SEND = 1
    RECEIVE = 2
    WAIT = 3


class Tape:
    """Steps of all ranks at once, in place of a `Clock`: ("spend", part, s), ("post", Post)..."""

    now = None  # nobody knows

    def __init__(self) -> None:
        self.steps: list[tuple] = []

    def spend(self, part: str, seconds: np.ndarray | float) -> None:
        """Every rank is busy."""
        if np.any(seconds):
            self.steps.append(("spend", part, seconds))


class TapedLinks(Links):
    """Messages that are written down.

    Attributes
    ----------
    pairs : list of (Post, Post)
        Each message as sent and as received.
    """

    def __init__(self, machine: Machine, layout: Layout, tape: Tape) -> None:
        super().__init__(machine, layout, tape)
        self.pairs: list[tuple[Post, Post]] = []

    def depart(self) -> None:
        """Write down what was posted since the last time."""
        if not self._batch:
            return
        self._clock.spend("other", self._overheads)
        for pairs in self._flows().values():
            for sent, received in pairs:
                route = sent.route
                seconds = sent.nbytes / self._rate[0][route.index]
                received.work = (self._unhidden[route.kind] * seconds)[self._back(route).to]
                self.pairs.append((sent, received))
        for message in self._batch:
            self._clock.steps.append(("post", self._posts[message]))
        self._batch, self._overheads = [], 0.0

    def wait(self, messages: Sequence[Message]) -> None:
        """Every rank waits for messages."""
        self.depart()
        self._clock.steps.append(("wait", [self._posts.pop(x) for x in messages]))

    def finish(self) -> None:
        """Every rank waits until all its messages have left."""
        self.depart()
        if sent := [post for message, post in self._posts.items() if message.sent]:
            self._clock.steps.append(("wait", sent))


class Record:
    """The arrays of a replay, filled by `of_all` or by `of_each`.

    Attributes
    ----------
    ops : list of tuple of five int
        Kind, whether an array has an entry for each rank, and three operands.
    ranges : list of tuple of two int
        By rank: where its ops begin and end.
    messages : list of tuple of four int
        Whether there is one of each rank, its first number, where in `ints` the receivers are and
        where the bytes.
    sides : list of tuple of two int
        What waits wait for: a message, and where in `ints` is who sent it to whom; -1: the sender.
    spent : dict of str to (P,) float64
        Seconds that every rank is busy with each of `PARTS`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ops: list[tuple[int, int, int, int, int]] = []
        self.ranges: list[tuple[int, int]] = []
        self.messages: list[tuple[int, int, int, int]] = []
        self.sides: list[tuple[int, int]] = []
        self.spent = {part: np.zeros(size) for part in PARTS}
        self._pools = {kind: _Pool(kind) for kind in (np.int64, np.float64)}
        self._numbers = 0
        self._ends: set[tuple[int, int]] = set()
        self._routes: dict[int, object] = {}

    @property
    def ints(self) -> np.ndarray:
        """All whole numbers that others point to."""
        return self._pools[np.int64].all()

    @property
    def doubles(self) -> np.ndarray:
        """Likewise seconds."""
        return self._pools[np.float64].all()

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Logical ranks that send something, and to whom, without repetition."""
        pairs = set(self._ends)
        for to in self._routes.values():
            pairs.update(enumerate(to.tolist()))
        found = np.array(sorted(pairs), np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def of_all(self, steps: list[tuple], pairs: list[tuple[Post, Post]]) -> None:
        """The steps of a `Tape` and the messages of its `TapedLinks`."""
        known: dict[Post, tuple[int, int]] = {}
        for sent, received in pairs:
            to = sent.route.to
            self._routes[id(to)] = to  # routes are the same objects
            number = self._message(True, to, np.broadcast_to(sent.nbytes, self.size))
            known[sent] = number, -1
            known[received] = number, self._put(np.int64, received.route.to)
        for step in steps:
            if step[0] == "spend":
                self._spend(*step[1:], slice(None))
            elif step[0] == "post":
                number, source = known[step[1]]
                kind = Kind.SEND if source < 0 else Kind.RECEIVE
                self.ops.append((kind, 1, number, source, 0))
            else:
                work = sum(x.work for x in step[1] if known[x][1] >= 0)
                self._wait([known[x] for x in step[1]], work)
        self.ranges = [(0, len(self.ops))] * self.size

    def of_each(self, events: Events) -> None:
        """The programs of all ranks."""
        numbers: dict[Transfer, int] = {}
        for rank in range(self.size):
            begin = len(self.ops)
            for step in events.programs[rank].steps:
                if step[0] == "spend":
                    self._spend(*step[1:], rank)
                elif step[0] == "depart":
                    for x in step[1]:
                        if x not in numbers:
                            numbers[x] = self._message(False, [x.to], [x.nbytes])
                            self._ends.add((x.source, x.to))
                        kind, source = Kind.SEND, -1
                        if x.source != rank:
                            kind, source = Kind.RECEIVE, 0
                        self.ops.append((kind, 0, numbers[x], source, x.source))
                else:
                    sides = [(numbers[x], -1 if x.source == rank else 0) for x in step[1]]
                    work = events.work(rank, step[1]) if step[2] else 0.0
                    self._wait(sides, work)
            self.ranges.append((begin, len(self.ops)))

    def _spend(self, part: str, seconds: np.ndarray | float, ranks) -> None:
        self.spent[part][ranks] += seconds
        where, wide = self._seconds(seconds)
        self.ops.append((Kind.SPEND, wide, where, 0, 0))

    def _message(self, wide: bool, to, nbytes) -> int:
        first, self._numbers = self._numbers, self._numbers + (self.size if wide else 1)
        nbytes = np.rint(nbytes).astype(np.int64)
        where = self._put(np.int64, to), self._put(np.int64, nbytes)
        self.messages.append((int(wide), first, *where))
        return len(self.messages) - 1

    def _wait(self, sides: list[tuple[int, int]], work: np.ndarray | float) -> None:
        where, wide = self._seconds(work) if np.any(work) else (-1, 0)
        self.ops.append((Kind.WAIT, wide, len(self.sides), len(sides), where))
        self.sides += sides

    def _seconds(self, values: np.ndarray | float) -> tuple[int, int]:
        """Place of seconds in `doubles`, and whether there are some for each rank."""
        values = np.atleast_1d(values)
        return self._put(np.float64, values), int(len(values) > 1)

    def _put(self, kind: type, values) -> int:
        return self._pools[kind].put(values)


class _Pool:
    """Arrays after each other, each once."""

    def __init__(self, kind: type) -> None:
        self._kind, self._size = kind, 0
        self._where: dict[bytes, int] = {}

    def put(self, values) -> int:
        """Add an array; returns its place in `all`."""
        data = np.ascontiguousarray(values, self._kind).tobytes()
        if data not in self._where:
            self._where[data] = self._size
            self._size += len(data) // 8
        return self._where[data]

    def all(self) -> np.ndarray:
        return np.frombuffer(b"".join(self._where), self._kind)
