"""What all ranks of a channel exchange: parts that all need, contributions to each one's part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from a2d_mpi.comm.channel import Channel
from a2d_mpi.core.pieces import cut
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace


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
