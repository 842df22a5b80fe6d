"""Messages between ranks: posted early, counted, and agreed upon before anything is sent.

Tensors travel point to point only.  Both sides of a message know its size from the distribution,
so nothing is negotiated and an empty part costs no message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.transport import HostTransport
from a2d_mpi.comm.watch import Watch
from a2d_mpi.core.pieces import cut
from a2d_mpi.devices.host import Array, Workspace


class CollectiveError(ValueError):
    """Raised on all ranks of a communicator together, with the same message."""


def agree(comm: MPI.Intracomm, problem: str | None, config: Mapping[str, object] = {}) -> None:
    """Raise the same error on all ranks if any has a problem or they disagree.

    Collective over `comm`, and to be called before the first message that depends on `config`.

    Parameters
    ----------
    comm : Intracomm
    problem : str or None
        What is wrong on this rank.
    config : mapping
        Values that must be the same on all ranks; they are compared by their text.

    Raises
    ------
    CollectiveError
        With the first rank's problem, or the first value that differs and who has which.
    """
    everyone = comm.allgather((problem, {key: _text(value) for key, value in config.items()}))
    problems = [(rank, p) for rank, (p, _) in enumerate(everyone) if p is not None]
    if problems:
        rank, text = problems[0]
        ranks = [r for r, p in problems if p == text]
        where = f"rank {rank}" if len(ranks) == 1 else f"{len(ranks)} of {comm.size} ranks"
        raise CollectiveError(text if len(ranks) == comm.size else f"{text} (on {where})")
    for key, value in everyone[0][1].items():
        for rank, (_, theirs) in enumerate(everyone):
            if theirs.get(key) != value:
                raise CollectiveError(
                    f"ranks disagree on {key}: {value} on rank 0, {theirs.get(key)} on rank {rank}"
                )


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # a number of too many digits, or whatever a caller has passed
        return f"{type(value).__name__} ({error})"


class Traffic:
    """Bytes that this rank sent and received, by phase and communicator.

    Attributes
    ----------
    bytes : dict
        ``{(phase, communicator): [sent, received]}``, e.g. ``("forward", "row")``.
    messages : dict
        The number of messages, likewise.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything counted so far."""
        self.bytes: dict[tuple[str, str], list[int]] = {}
        self.messages: dict[tuple[str, str], list[int]] = {}

    def count(self, phase: str, name: str, direction: int, nbytes: int, messages: int) -> None:
        """Count one tensor; direction 0: sent, 1: received."""
        self.bytes.setdefault((phase, name), [0, 0])[direction] += nbytes
        self.messages.setdefault((phase, name), [0, 0])[direction] += messages


class Channel:
    """Nonblocking messages on one communicator, counted and timed.

    Parameters
    ----------
    comm : Intracomm
    name : str
        Of the communicator in the counters: "row", "col", "ring".
    traffic : Traffic
    """

    def __init__(self, comm: MPI.Intracomm, name: str, traffic: Traffic) -> None:
        self.comm, self.name, self.traffic = comm, name, traffic
        self.rank, self.size = comm.rank, comm.size
        self.phase = ""
        # From when to when inside `wait`, by time.perf_counter: communication that nothing hid.
        self.waits: list[tuple[float, float]] = []

    def start(self, phase: str, transport: HostTransport, watch: Watch) -> None:
        """Begin a phase: later messages count towards it, and `waits` starts empty.

        `transport`: how tensors get to MPI, a `HostTransport` or `DeviceTransport`.
        """
        self.phase, self.waits, self._transport, self._watch = phase, [], transport, watch

    @property
    def peers(self) -> list[int]:
        """The other ranks, nearest following first: no rank is everybody's first target."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def isend(self, tensors: Sequence[Array], peer: int, tag: int) -> list[Any]:
        """Start sending C-contiguous tensors, with tags from `tag` on.

        They must not change until `wait` has taken what is returned.
        """
        return [
            message
            for t, flat in self._flat(tensors, tag, 0)
            for message in self._transport.send(self.comm, flat, peer, t)
        ]

    def irecv(self, tensors: Sequence[Array], peer: int, tag: int) -> list[Any]:
        """Start receiving into C-contiguous tensors, with tags from `tag` on."""
        return [
            message
            for t, flat in self._flat(tensors, tag, 1)
            for message in self._transport.receive(self.comm, flat, peer, t)
        ]

    def wait(self, messages: list[Any]) -> None:
        """Complete the messages and empty the list."""
        start = time.perf_counter()
        with self._watch.waiting(f"for messages ({self.name})"):
            self._transport.wait(messages)
        self.waits.append((start, time.perf_counter()))

    def _flat(
        self, tensors: Sequence[Array], tag: int, direction: int
    ) -> Iterator[tuple[int, Array]]:
        """Count the messages in which the tensors travel, and yield these as (tag, bytes)."""
        for t, tensor in enumerate(tensors, tag):
            if tensor.size:
                # As bytes: MPI has no bfloat16, and nothing is reduced on the way.
                flat = tensor.reshape(-1).view(np.uint8)
                messages = -(-flat.size // self._transport.limit)
                self.traffic.count(self.phase, self.name, direction, flat.size, messages)
                yield t, flat


class Gather:
    """Every rank of a channel gets the parts of all others, chunk by chunk.

    All receives and all sends of the own part are posted at once; a chunk, or one of the units in
    which it travels (`a2d_mpi.core.pieces.cut`), may be used after ``wait(peer)``, and the local
    arrays changed after ``finish()``.

    Parameters
    ----------
    channel : Channel
    local : dict of arrays (count, ...)
        My part of each tensor, C-contiguous.
    counts : sequence of int
        Tokens of every rank of the channel.
    work : Workspace
        Where the gathered tensors lie.

    Attributes
    ----------
    whole : list of arrays (sum(counts), ...)
        The gathered tensors, chunks in the order of ranks.
    """

    _TAG = 0

    def __init__(
        self,
        channel: Channel,
        local: dict[str, Array],
        counts: Sequence[int],
        work: Workspace,
    ) -> None:
        self._channel = channel
        self._slices = slices(counts)
        if channel.size == 1:
            self.whole = list(local.values())
        else:
            self.whole = [
                work.get(("gathered", name), (sum(counts), *x.shape[1:]), x.dtype)
                for name, x in local.items()
            ]
        self._receives = {
            peer: [
                channel.irecv([x[s] for x in self.chunk(peer)], peer, tag)
                for tag, s in _tagged_units(counts[peer], channel.size, self._TAG)
            ]
            for peer in channel.peers
        }
        # My chunk is the first one that the rank before me wants, the last for the one after me.
        mine = list(local.values())
        self._sends = [
            r
            for peer in reversed(channel.peers)
            for tag, s in _tagged_units(counts[channel.rank], channel.size, self._TAG)
            for r in channel.isend([x[s] for x in mine], peer, tag)
        ]
        if channel.size > 1:
            for own, x in zip(self.chunk(channel.rank), mine, strict=True):
                work.device.put(own, x)

    def chunk(self, rank: int) -> list[Array]:
        """The part of `rank` of each tensor, inside `whole`."""
        return [x[self._slices[rank]] for x in self.whole]

    def wait(self, rank: int | None = None, unit: int | None = None) -> None:
        """Wait for all chunks, that of `rank` (at once for my own), or one of its units."""
        for peer in self._channel.peers if rank is None else [rank]:
            receives = self._receives.get(peer, [])
            for requests in receives if unit is None else receives[unit : unit + 1]:
                if requests:
                    self._channel.wait(requests)

    def finish(self) -> None:
        """Wait until my part has left."""
        self._channel.wait(self._sends)


class Partials:
    """Every rank of a channel sends all others its contribution to their parts.

    Parameters
    ----------
    channel : Channel
    name : str
        Of the buffers.
    like : list of arrays
        My part of each tensor: the shapes and dtypes of what the others contribute.
    work : Workspace
        Where their contributions lie.
    hold : bool
        Send nothing before `release`.
    """

    _TAG = 8  # away from the tags of a Gather on the same channel

    def __init__(
        self,
        channel: Channel,
        name: str,
        like: list[Array],
        work: Workspace,
        hold: bool = False,
    ) -> None:
        self._channel = channel
        self._held: list[tuple[int, int | None, list[Array]]] | None = [] if hold else None
        self._sends: list[Any] = []
        self._buffers = {
            peer: [
                work.get(("partial", name, i, peer), x.shape, x.dtype) for i, x in enumerate(like)
            ]
            for peer in channel.peers
        }
        self._receives = {
            peer: [
                r
                for tag, s in _tagged_units(len(buffers[0]), channel.size, self._TAG)
                for r in channel.irecv([x[s] for x in buffers], peer, tag)
            ]
            for peer, buffers in self._buffers.items()
        }

    def send(self, peer: int, tensors: list[Array], unit: int | None = None) -> None:
        """Start sending a contribution to its owner `peer`: all of it, or a finished unit."""
        if self._held is not None:
            self._held.append((peer, unit, tensors))
            return
        units = _tagged_units(len(tensors[0]), self._channel.size, self._TAG)
        for tag, s in units if unit is None else units[unit : unit + 1]:
            self._sends += self._channel.isend([x[s] for x in tensors], peer, tag)

    def release(self) -> None:
        """Send what was held."""
        held, self._held = self._held or [], None
        for peer, unit, tensors in held:
            self.send(peer, tensors, unit)

    def receive(self) -> Iterator[list[Array]]:
        """The contributions to my part, always in the same order: results repeat bit for bit."""
        for peer in self._channel.peers:
            self._channel.wait(self._receives[peer])
            yield self._buffers[peer]

    def finish(self) -> None:
        """Wait until all my contributions have left."""
        self._channel.wait(self._sends)


def _tagged_units(tokens: int, ranks: int, tag: int) -> list[tuple[int, slice]]:
    """The units of a chunk, each with a tag of its own: they may overtake each other."""
    return [(tag + 16 * u, s) for u, s in enumerate(cut(tokens, ranks))]


def slices(counts: Sequence[int]) -> list[slice]:
    """Where each of consecutive pieces of the given lengths lies."""
    ends = np.cumsum(counts).tolist()
    return [slice(end - n, end) for n, end in zip(counts, ends, strict=True)]
