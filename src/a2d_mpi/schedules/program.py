"""Programs: the steps of one rank in one phase, and the functions that write them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable

from a2d_mpi.schedules.arrays import ProgramArrays, common_rows
from a2d_mpi.schedules.group import Group
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
    Step,
    Wait,
)


class StepLimit(Exception):
    """The program has reached its largest number of steps."""


class Program(ProgramArrays):
    """Everything that one rank does in one phase: its arrays, and the steps that use them.

    A method appends steps that say what happens.  What this costs (packing, order of keys,
    rounding, waits at the end) is added by `a2d_mpi.schedules.passes`.

    Parameters
    ----------
    rank : int
        Rank in the group.
    group : Group
    stride, offset : int
        The rank p of the group is the rank ``p stride + offset`` of the layout.
    most : int, optional
        Most steps to write.  Default: all.

    Attributes
    ----------
    channels : dict of str to tuple of int
        The ranks of the group in each channel, in the order of their ranks in the channel.
    steps : list of Step
    body : int
        Number of steps before the waits that end the program.
    messages : int
        Number of messages, sent and received.
    results : dict of str to Rows
        Rows that hold the results of this rank's shard at the end, by kind.
    number, slice : int
        Which program of a slice it is, and which slice; both are counted from 0.
    first, last : bool
        Whether the slice is the first, and the last, of those that share KV heads.
    arrays, mask
        As in `ProgramArrays`.
    """

    def __init__(
        self, rank: int, group: Group, stride: int = 1, offset: int = 0, most: int | None = None
    ) -> None:
        super().__init__(rank, group)
        self._stride, self._offset, self._most = stride, offset, most
        self.channels: dict[str, tuple[int, ...]] = {}
        self.steps: list[Step] = []
        self.results: dict[str, Rows] = {}
        self.number = self.slice = 0
        self.first = self.last = True
        self.messages = self.body = 0
        self._turns: Counter[tuple] = Counter()  # messages so far, by what `Send.turn` counts

    def with_steps(self, steps: Iterable[Step] = ()) -> Program:
        """Return a program with the same arrays and other steps, for a pass."""
        new = copy.copy(self)
        new.arrays, new.steps, new._most = dict(self.arrays), list(steps), None
        return new

    def grid_rank(self, rank: int) -> int:
        """Return the rank in the layout of a rank of the group."""
        return rank * self._stride + self._offset

    @property
    def copied(self) -> list[Rows]:
        """Results that lie in buffers, of which the caller gets copies."""
        return [x for x in self.results.values() if self.arrays[x.array].role == "buffer"]

    def add(self, step: Step) -> None:
        """Append a step; raise `StepLimit` if it is the last one that is allowed."""
        self.steps.append(step)
        if len(self.steps) == self._most:
            raise StepLimit

    # Messages.

    def receive(self, channel: str, peer: int, rows: Rows, tag: int = 0) -> Receive | None:
        """Start receiving rows; return the message, or None without rows."""
        return self._post(Receive, channel, peer, rows, tag)

    def send(self, channel: str, peer: int, rows: Rows, tag: int = 0) -> Send | None:
        """Start sending rows; return the message, or None without rows."""
        return self._post(Send, channel, peer, rows, tag)

    def wait(self, messages: Iterable[Message | None]) -> None:
        """Block until messages of one channel are done."""
        if posted := [x for x in messages if x]:
            self.add(Wait(posted[0].channel, tuple(x.index for x in posted)))

    def _post(
        self, way: type[Message], channel: str, peer: int, rows: Rows, tag: int
    ) -> Message | None:
        if not rows.runs:
            return None
        key = way, channel, peer, self.arrays[rows.array].kind, tag
        message = way(channel, peer, rows, tag, self._turns[key], self.messages)
        self._turns[key] += 1
        self.messages += 1
        self.add(message)
        return message

    # Work.

    def copy(self, source: Rows, target: Rows) -> None:
        """Copy rows."""
        if source.runs:
            self.add(Copy(source, target))

    def clear(self, rows: Rows) -> None:
        """Set rows to zero."""
        if rows.runs:
            self.add(Clear(rows))

    def sums(self, name: str, kind: str, like: str) -> str:
        """Declare and clear an array of sums for the rows of the array `like`; return its name."""
        self.clear(self.rows(self.array(name, kind, self.arrays[like].pieces)))
        return name

    def attend(self, queries: Rows, keys: Rows, target: Rows) -> None:
        """Merge the partial result of queries over keys into rows, which begin as empty results.

        An array of results needs at least one call for every row, even if nothing is visible.
        """
        if queries.runs:
            self.add(Attend(queries, keys, target))

    def differentiate(self, queries: Rows, keys: Rows, dq: Rows, dkv: Rows) -> None:
        """Add gradients, in one kernel call for each run of keys."""
        if self.sees(queries, keys):
            for k_run, dkv_run in common_rows(keys, dkv):
                self.add(Differentiate(queries, k_run, dq, dkv_run))

    def combine(self, source: Rows, target: Rows) -> None:
        """Merge a partial result into rows of the same kind, or add a sum to them."""
        if source.runs:
            is_sum = self.arrays[target.array].kind != "out"
            self.add(Add(source, target) if is_sum else self.merge_of(source, target))

    def merge_of(self, source: Rows, target: Rows) -> Merge:
        """Return the step that merges a partial result; declare the compensation of its lse."""
        pieces = self.arrays[target.array].pieces
        name = self.array(f"compensation of {target.array}", "compensation", pieces)
        return Merge(source, target, target._replace(array=name))
