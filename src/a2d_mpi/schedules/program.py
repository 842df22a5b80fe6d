"""Programs: the steps of one rank in one phase, and the functions that write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from a2d_mpi.schedules.arrays import ProgramArrays, common_rows
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.steps import (
    KINDS,
    Add,
    Attend,
    Barrier,
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

PARTIALS = ("out", "dq", "dkv")  # kinds of rows that hold partial results


class StepLimit(Exception):
    """The program has reached its largest number of steps."""


class _StepList(list):
    """Steps, at most `most`; None: any number."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.most = most

    def append(self, step: Step) -> None:
        """Add a step; raise `StepLimit` if it is the last one that is allowed."""
        super().append(step)
        if self.most is not None and len(self) >= self.most:
            raise StepLimit


class Program(ProgramArrays):
    """Everything that one rank does in one phase: its arrays, and the steps that use them.

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
        Number of messages, sent and received, and of barriers.
    results : dict of str to Rows
        Rows that hold the results of this rank's shard at the end, by kind.
    arrays, mask
        As in `ProgramArrays`.
    """

    def __init__(
        self, rank: int, group: Group, stride: int = 1, offset: int = 0, most: int | None = None
    ) -> None:
        super().__init__(rank, group)
        self._stride, self._offset = stride, offset
        self.channels: dict[str, tuple[int, ...]] = {}
        self.steps = _StepList(most)
        self.results: dict[str, Rows] = {}
        self.messages = self.body = 0
        # Number of messages so far, by what `Send.turn` counts, minus 1.
        self._turns: dict[tuple, int] = {}
        # Barriers that this rank has entered and not passed.
        self._barriers: list[Barrier] = []
        # Arguments of `send` that `give` holds back without overlap.
        self._held: list[tuple[str, int, Rows]] = []
        # Packed copies of scattered rows.
        self._packed: dict[Rows, Rows] = {}
        # By array: the array of the same rows on the wire, and the rows that it holds so far.
        self._wires: dict[str, str] = {}
        self._on_wire: dict[str, list[range]] = {}
        # By index of a message that has not been waited for: its rows on the wire, and decoded.
        self._encoded: dict[int, tuple[Rows, Rows]] = {}
        # Rows for partial results that are merged at once, by the rows that they are merged into.
        self._partial: dict[Rows, Rows] = {}
        # Rows of each array that hold a partial result already.
        self._written: dict[str, list[range]] = {}
        # Arrays whose sorted twin has been filled; arrays whose sorted twin holds sums to add.
        self._sorted: set[str] = set()
        self._unsorted_sums: set[str] = set()

    def grid_rank(self, rank: int) -> int:
        """Return the rank in the layout of a rank of the group."""
        return rank * self._stride + self._offset

    # Rows by token.

    def sorted(self, name: str) -> str:
        """Copy the rows of an array to its sorted twin, only once; return the twin."""
        twin = self.sorted_twin(name)
        if twin != name and name not in self._sorted:
            self._sorted.add(name)
            self.copy(self.rows(name), self._piecewise(twin))
        return twin

    def sums(
        self, name: str, kind: str, like: str, by_token: bool = False
    ) -> Callable[[Rows], Rows]:
        """Declare and clear an array of sums for the rows of another array.

        Parameters
        ----------
        name, kind : str
        like : str
            The array with the same tokens.
        by_token : bool
            Whether kernel calls add to all rows in the order of tokens, as with `sorted`.  Their
            sums have an array of their own, which is added to `name` before rows of `name` are
            first sent or combined.

        Returns
        -------
        callable
            Takes rows of the array `like` or of its sorted twin.  Returns the rows of their sums.
        """
        self.array(name, kind, self.arrays[like].pieces)
        self.clear(self.rows(name))
        names = {like: name}
        if by_token and (twin := self.sorted_twin(name)) != name:
            names[self.sorted_twin(like)] = twin
            self.clear(self.rows(twin))
            self._unsorted_sums.add(name)
        return lambda rows: rows._replace(array=names[rows.array])

    # Messages.

    def receive(self, channel: str, peer: int, rows: Rows, tag: int = 0) -> Receive | None:
        """Start receiving rows; return the message, or None without rows."""
        if not rows.runs:
            return None
        message = Receive(channel, peer, rows, tag, *self._count(False, channel, peer, rows, tag))
        if (wire := self._wire(rows.array)) == rows.array:
            self.steps.append(message)
        else:  # `wait` decodes the rows
            arriving = rows._replace(array=wire)
            self._encoded[message.index] = arriving, rows
            self._hold(arriving)
            self.steps.append(message._replace(rows=arriving))
        return message

    def send(self, channel: str, peer: int, rows: Rows, tag: int = 0) -> Send | None:
        """Start sending rows; return the message, or None without rows.

        Steps that the message needs come first.  A partial result waits for the barriers of
        `gathered`.  Sums of a sorted twin are added.  A partial out in the accumulation dtype is
        rounded to the storage dtype.  The rows are encoded for the wire.  Scattered rows are
        packed into a copy.
        """
        if not rows.runs:
            return None
        if self.arrays[rows.array].kind in PARTIALS:
            self._pass_barriers()
        self._add_sorted_sums(rows.array)
        rows = self._for_wire(self._rounded(rows))
        if len(rows.runs) > 1:
            rows = self._side_by_side(rows)
        message = Send(channel, peer, rows, tag, *self._count(True, channel, peer, rows, tag))
        self.steps.append(message)
        return message

    def wait(self, messages: Iterable[Message | Barrier | None]) -> None:
        """Block until messages or barriers of one channel are done."""
        if posted := [x for x in messages if x]:
            self.steps.append(Wait(posted[0].channel, tuple(x.index for x in posted)))
            for x in posted:
                if x.index in self._encoded:
                    wire, rows = self._encoded.pop(x.index)
                    self.copy(wire, rows)

    def exchange(self, *messages: Message | None) -> list[Message]:
        """Return messages that travel at the same time.

        Without overlap, wait for them at once and return an empty list.
        """
        posted = [x for x in messages if x]
        if not self.group.overlap:
            self.wait(posted)
            return []
        return posted

    def gathered(self, *channels: str) -> None:
        """Enter a barrier of each channel, after this rank has gathered all rows from it.

        Call it after the waits for these rows, on every rank of the channels.  The rank sends its
        first partial result after all ranks of the channels have entered.  Earlier results would
        share links with rows that other ranks wait for.
        """
        for channel in channels:
            if len(self.channels[channel]) > 1:
                self._barriers.append(Barrier(channel, self.messages))
                self.steps.append(self._barriers[-1])
                self.messages += 1

    def _pass_barriers(self) -> None:
        """Wait for the barriers that this rank has entered."""
        for barrier in self._barriers:
            self.wait([barrier])
        self._barriers = []

    def give(self, channel: str, owner: int, rows: Rows) -> None:
        """Send a finished partial result to its owner; without overlap, `release` sends it."""
        if self.group.overlap:
            self.send(channel, owner, rows)
        else:
            self._held.append((channel, owner, rows))

    def release(self, channel: str) -> None:
        """Send all partial results of a channel that `give` held back."""
        for x in [x for x in self._held if x[0] == channel]:
            self.send(*x)
        self._held = [x for x in self._held if x[0] != channel]

    @property
    def copied(self) -> list[Rows]:
        """Results that lie in buffers, of which the caller gets copies."""
        return [x for x in self.results.values() if self.arrays[x.array].role == "buffer"]

    def finish(self) -> None:
        """Wait for all messages for which there is no wait yet."""
        self.steps.most, self.body = None, len(self.steps)
        waited = {x for step in self.steps if isinstance(step, Wait) for x in step.messages}
        left = [
            x
            for x in self.steps
            if isinstance(x, Send | Receive | Barrier) and x.index not in waited
        ]
        for channel in self.channels:
            self.wait(x for x in left if x.channel == channel)

    def _count(self, sent: bool, channel: str, peer: int, rows: Rows, tag: int) -> tuple[int, int]:
        """Count a message; return its turn and index."""
        key = sent, channel, peer, self.arrays[rows.array].kind, tag
        turn = self._turns[key] = self._turns.get(key, -1) + 1
        self.messages += 1
        return turn, self.messages - 1

    def _wire(self, name: str) -> str:
        """Return the array of the same rows encoded for the wire; itself if not encoded."""
        if name not in self._wires:
            array, self._wires[name] = self.arrays[name], name
            if self.group.encodes(array):
                self._wires[name] = f"{name} on the wire"
                self.arrays[self._wires[name]] = replace(
                    array, role="buffer", wire=True, room=f"{array.room} on the wire"
                )
        return self._wires[name]

    def _rounded(self, rows: Rows) -> Rows:
        """Return a copy of rows whose partial out has the storage dtype, in which it travels."""
        array = self.arrays[rows.array]
        if not (self.group.config.mixed_precision and "out" in array.accumulated):
            return rows
        rounded = rows._replace(
            array=self.array(f"rounded {rows.array}", array.kind, array.pieces)
        )
        self.copy(rows, rounded)
        return rounded

    def _for_wire(self, rows: Rows) -> Rows:
        """Return rows encoded for the wire.

        Rows that are encoded already, for example because they arrived so, are not encoded again.
        Sums and partial results change, so they are encoded whenever they are sent.  If one of the
        given rows is sent, all rows of the array are encoded at once.
        """
        name, array = self._wire(rows.array), self.arrays[rows.array]
        if name == rows.array:
            return rows
        held = self._on_wire.get(name, ())
        if array.kind in PARTIALS or not all(
            any(x.start <= run.start and run.stop <= x.stop for x in held) for run in rows.runs
        ):
            source = self.rows(rows.array) if array.role == "given" else rows
            encoded = source._replace(array=name)
            self.copy(source, encoded)
            self._hold(encoded)
        return rows._replace(array=name)

    def _hold(self, encoded: Rows) -> None:
        """Record that an array for the wire holds rows; adjacent runs are joined."""
        held = self._on_wire.setdefault(encoded.array, [])
        for run in encoded.runs:
            if held and held[-1].stop == run.start:
                held[-1] = range(held[-1].start, run.stop)
            else:
                held.append(run)

    def _side_by_side(self, rows: Rows) -> Rows:
        """Return a packed copy of scattered rows, which is made when it is first needed."""
        if rows not in self._packed:
            array = self.arrays[rows.array]
            name = self.array(
                f"packed {len(self._packed)}",
                array.kind,
                self.pieces(rows),
                accumulated=array.accumulated,
                wire=array.wire,
            )
            self._packed[rows] = self.rows(name)
            self.copy(rows, self._packed[rows])
        return self._packed[rows]

    # Work.

    def copy(self, source: Rows, target: Rows) -> None:
        """Copy rows."""
        if source.runs:
            self.steps.append(Copy(source, target))

    def clear(self, rows: Rows) -> None:
        """Set rows to zero."""
        if rows.runs:
            self.steps.append(Clear(rows))

    def attend(self, queries: Rows, keys: Rows, target: Rows) -> None:
        """Compute a partial result; write it to rows without a result yet, or merge it."""
        if not queries.runs:
            return
        written = self._written.setdefault(target.array, [])
        if not any(a.start < b.stop and b.start < a.stop for a in target.runs for b in written):
            written += target.runs
            self.steps.append(Attend(queries, keys, target))
        elif self.sees(queries, keys):
            partial = self._partial_of(target)
            self.steps.append(Attend(queries, keys, partial))
            self.combine(partial, target)

    def differentiate(
        self, queries: Rows, keys: Rows, dq: Rows, dkv: Rows, fresh: bool = False
    ) -> None:
        """Add gradients, in one kernel call for each run of keys; write them if `fresh`."""
        if not fresh and not self.sees(queries, keys):
            return
        for k_run, dkv_run in common_rows(keys, dkv) or [(keys, dkv)]:
            self.steps.append(Differentiate(queries, k_run, dq, dkv_run, fresh))

    def combine(self, source: Rows, target: Rows) -> None:
        """Merge a partial result into rows of the same kind, or add a sum to them."""
        if not source.runs:
            return
        self._add_sorted_sums(source.array)
        array = self.arrays[target.array]
        if array.kind != "out":
            self.steps.append(Add(source, target))
            return
        name = f"compensation of {target.array}"
        if name not in self.arrays:
            self.array(name, "compensation", array.pieces)
            self.clear(self.rows(name))
        self.steps.append(Merge(source, target, target._replace(array=name)))

    def _partial_of(self, target: Rows) -> Rows:
        """Declare rows for a partial result that is merged into `target` at once."""
        if target not in self._partial:
            self._partial[target] = self.rows(
                self.array(
                    f"partial {len(self._partial)}",
                    "out",
                    self.pieces(target),
                    accumulated=KINDS["out"],
                    as_computed=True,
                    room="partial",
                )
            )
        return self._partial[target]

    def _add_sorted_sums(self, name: str) -> None:
        """Add the sums in an array's sorted twin to the array, before its rows are used."""
        if name in self._unsorted_sums:
            self._unsorted_sums.remove(name)
            twin = self.sorted_twin(name)
            self.steps.append(Add(self._piecewise(twin), self.rows(name)))
