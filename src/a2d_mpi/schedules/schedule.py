"""Schedules: the steps of a rank in one phase, and how methods write them down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from a2d_mpi.core.masks import Mask
from a2d_mpi.core.meetings import Others, Ranks, is_none
from a2d_mpi.schedules.sizes import Meets, Sizes
from a2d_mpi.schedules.steps import (
    FIRST,
    KINDS,
    OF_KEYS,
    REST,
    Array,
    Copy,
    Message,
    Rows,
    Step,
    Wait,
)


@dataclass
class Schedule:
    """The steps of a rank in one phase.

    Attributes
    ----------
    rank : Ranks
    sizes : Sizes
    axis : (int, Ranks)
        Logical rank of p is ``p axis[0] + axis[1]``.
    channels : dict of str to tuple of Ranks
        The ranks of each channel, by their rank in it.
    arrays : dict of str to Array
    steps : list of Step
    results : dict of str to Rows
        Rows that hold the results of this rank's shard in the end, by kind.
    mask : Mask or None
        Of the pairs that this rank computes, if its tiles hold pairs that others compute.
    cuts : callable
        Tells whether a rank's own rows are computed in two parts, of which one comes last.  Its
        arguments: the schedule so far, own rows, the rows that these meet, and the number of ranks
        among which partial results travel.
    """

    rank: Ranks
    sizes: Sizes
    axis: tuple[int, Ranks] = (1, 0)
    cuts: Callable[[Schedule, Rows, Rows, int], bool] = lambda *_: False
    mask: Mask | None = None
    channels: dict[str, tuple[Ranks, ...]] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    results: dict[str, Rows] = field(default_factory=dict)
    counted: Any = None  # its `a2d_mpi.schedules.accounts.Tokens`, once these were asked for
    _held: list[Message] = field(default_factory=list)

    def array(
        self,
        name: str,
        kind: str,
        owners: Sequence[Ranks] = (),
        role: str = "buffer",
        **others: Any,
    ) -> str:
        """Declare an array; returns its name.  All tensors of results are wide by default."""
        if name not in self.arrays:
            if role == "result":
                others = {"wide": KINDS[kind], **others}
            if self.sizes.problem.meetings is None:
                others.pop("meets", None)
            self.arrays[name] = Array(kind, tuple(owners), role, **others)
        return name

    def add(self, *steps: Step) -> None:
        """Append steps."""
        self.steps += steps

    def receive(self, channel: str, peer: Ranks, rows: Rows, tag: int = 0) -> Message:
        """Append a message from a peer."""
        self.add(message := Message(False, channel, peer, rows, tag))
        return message

    def send(self, channel: str, peer: Ranks, rows: Rows, tag: int = 0) -> Message:
        """Append a message to a peer."""
        self.add(message := Message(True, channel, peer, rows, tag))
        return message

    def wait(self, messages: Sequence[Message]) -> None:
        """Append a wait for messages, if there are any."""
        if messages:
            self.add(Wait(tuple(messages)))

    def exchange(self, *messages: Message) -> list[Message]:
        """Messages that were posted together; without overlap, these are waited for at once."""
        if not self.sizes.overlap:
            self.wait(messages)
            return []
        return list(messages)

    def give(self, channel: str, owner: Ranks, rows: Rows) -> None:
        """Send a finished partial result to its owner; without overlap, when all are finished."""
        if self.sizes.overlap:
            self.send(channel, owner, rows)
        else:
            self._held.append(Message(True, channel, owner, rows))

    def release(self, channel: str) -> None:
        """Send all that was held for a channel."""
        self.add(*(m for m in self._held if m.channel == channel))
        self._held = [m for m in self._held if m.channel != channel]

    def chosen(
        self, others: Others | None, chunk: tuple[int, int] | None = None
    ) -> Meets | tuple[int, int] | None:
        """Choose the part of a shard that meets others, or a chunk of it."""
        if others is None or self.sizes.problem.meetings is None:
            return chunk
        return Meets(others, chunk)

    def some(
        self,
        name: str,
        owner: Ranks,
        others: Others,
        provided: Others | None = None,
        unless: Others | None = None,
    ) -> Rows | None:
        """Rows of an owner that meet others; None if there are none.  See `Meets`."""
        meetings, of_keys = self.sizes.problem.meetings, self.arrays[name].of_keys
        if is_none(others) or (provided is not None and is_none(provided)):
            return None
        if unless is not None and is_none(unless):
            unless = None
        if meetings is None:
            return None if unless else Rows(name, owner)
        if isinstance(owner, int) and not (
            meetings.count(of_keys, owner, others)
            and (provided is None or meetings.count(of_keys, owner, provided))
            and (unless is None or not meetings.count(of_keys, owner, unless))
        ):
            return None
        return Rows(name, owner, Meets(others, None, provided, unless))

    def all_gather(
        self, channel: str, kind: str, own: str, peers: Sequence[Ranks], lines: Sequence[Others]
    ) -> tuple[str, dict[int, list[Message]]]:
        """Gather everyone's rows of an array, as far as they are needed.

        Parameters
        ----------
        channel, kind, own : str
        peers : sequence of Ranks
            Nearest following first.
        lines : sequence of Others
            Owners of the tokens that are to meet these: first on this rank, then on each peer.

        Returns
        -------
        The array that will have them, in the order of the channel's ranks, and the messages that
        bring each peer's rows, by the peer's place in `peers`.
        """
        if not peers:
            return own, {}
        ranks, of_keys, here = len(peers) + 1, kind in OF_KEYS, lines[0]
        whole = self.array(channel, kind, self.channels[channel], meets=here)
        coming = {
            i: [
                self.receive(channel, p, Rows(whole, p, x))
                for x in self.sizes.chunks(p, ranks, of_keys, here)
            ]
            for i, p in enumerate(peers)
        }
        # This rank's rows are the first that the rank before it needs, and the last of the next.
        for p, there in reversed(list(zip(peers, lines[1:]))):
            for x in self.sizes.chunks(self.rank, ranks, of_keys, there):
                self.send(channel, p, Rows(own, self.rank, self.chosen(there, x)))
        self.add(Copy(Rows(own, self.rank), Rows(whole, self.rank)))
        return whole, coming

    def partials(
        self, channel: str, kind: str, peers: Sequence[Ranks], lines: Sequence[Others]
    ) -> list[tuple[Rows, list[Message], Meets | None]]:
        """Post the receives of every peer's contributions to this rank's rows.

        `lines` as of `all_gather`.  Returns the rows of each contribution, the messages that bring
        them, and the part of this rank's shard that they are for.
        """
        found = []
        for i, (p, there) in enumerate(zip(peers, lines[1:]), 1):
            name = self.array(f"{kind} from {channel} {i}", kind, meets=there)
            chunks = self.sizes.chunks(self.rank, len(peers) + 1, kind in OF_KEYS, there)
            messages = [self.receive(channel, p, Rows(name, self.rank, x)) for x in chunks]
            if messages:
                found.append((Rows(name, self.rank), messages, self.chosen(there)))
        return found

    def logical(self, rank: Ranks) -> Ranks:
        """The logical rank of the layout that a rank of the schedule is."""
        return rank * self.axis[0] + self.axis[1]

    def parts(self, own: Rows, others: Rows, ranks: int) -> tuple[str | None, ...]:
        """Parts of this rank's own rows, which meet others: computed first, and last."""
        return (FIRST, REST) if self.cuts(self, own, others, ranks) else (None,)
