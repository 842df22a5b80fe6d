"""Exchanges of arrays between ranks: posted early, counted, from the memory of any device.

Sums of gradients are made of exchanges, in a fixed order, during the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call
from a2d_mpi.comm.channel import Channel, Traffic
from a2d_mpi.comm.device_transport import DeviceTransport
from a2d_mpi.comm.gpus import gpu_aware
from a2d_mpi.comm.survival import NoFailures
from a2d_mpi.comm.transport import HostTransport, Transport
from a2d_mpi.comm.watch import Watch
from a2d_mpi.core.sizes import next_ranks
from a2d_mpi.devices import device_of
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.gpt.layers import module_of

T = TypeVar("T", float, np.ndarray)


class Way(NamedTuple):
    """The way of arrays to other ranks.

    Attributes
    ----------
    traffic : Traffic
    device : Device
        Device of the arrays.
    transfers : {"auto", "device", "host"}
        Path of a GPU's arrays to MPI, as of a plan.
    failures : NoFailures, optional
        `ProcessGrid.failures` of these ranks, if MPI may continue when one of them dies.
    """

    traffic: Traffic
    device: Device = HOST
    transfers: str = "auto"
    failures: NoFailures | None = None


class ArrayExchange:
    """All-to-all and all-gather of arrays on a device, with one message for each pair of ranks.

    Collective: all ranks start the same exchanges in the same order.  Only `send` and `receive`
    are calls of two ranks.

    Parameters
    ----------
    comm : Intracomm
        The caller's communicator; a duplicate is used until `free`.
    phase, name : str
        Phase and channel of the messages in the traffic.
    way : Way
    """

    def __init__(self, comm: MPI.Intracomm, phase: str, name: str, way: Way) -> None:
        self.comm, self._device = comm.Dup(), way.device
        self._failures = way.failures or NoFailures(comm, [])
        self._failures.others.append(self.comm)
        self._channel = Channel(self.comm, name, way.traffic)
        aware, call = True, Call(comm)
        with call.checks():  # both read environment variables, which may differ between nodes
            self._watch = Watch(self.comm, f"{name} of a GPT", talks=False)
            aware = self._device is HOST or gpu_aware(way.transfers)[0]
        call.agree()
        self._staged = not all(comm.allgather(aware))
        self.start(phase)

    def start(self, phase: str) -> None:
        """Count later messages as those of a phase.

        The page-locked host buffers of a GPU's arrays are freed: their sizes depend on the phase.
        """
        self._transport: Transport = HostTransport()
        if self._device is not HOST:
            self._transport = DeviceTransport(self._device, self._staged)
        self._channel.start(phase, self._transport, self._watch)

    def all_to_all(self, sent: Sequence[Array], received: Sequence[Array], tag: int = 0) -> list:
        """Start to send ``sent[p]`` to each rank p, and to receive ``received[p]`` from it.

        Parameters
        ----------
        sent, received : sequence of arrays
            One C-contiguous array for each rank, on the device of the exchange.
        tag : int
            Exchanges that are under way at the same time need different tags.

        Returns
        -------
        list
            Messages for `wait`.
        """
        messages, own = [], self.comm.rank
        peers = next_ranks(own, self.comm.size)
        for peer in peers:
            messages += self._channel.irecv([received[peer]], peer, tag)
        for peer in peers:
            messages += self._channel.isend([sent[peer]], peer, tag)
        if sent[own].size:
            self._device.put(received[own], sent[own])
        return messages

    def all_gather(self, own: Array, received: Sequence[Array], tag: int = 0) -> list:
        """Start to send an array to all ranks; ``received[p]`` is for the array of rank p."""
        return self.all_to_all([own] * self.comm.size, received, tag)

    def send(self, x: Array, peer: int, tag: int = 0) -> list:
        """Start to send a C-contiguous array to one rank; return messages for `wait`."""
        return self._channel.isend([x], peer, tag)

    def receive(self, x: Array, peer: int, tag: int = 0) -> list:
        """Start to receive into a C-contiguous array; return messages for `wait`."""
        return self._channel.irecv([x], peer, tag)

    def wait(self, messages: list) -> None:
        """Complete messages, and empty the list."""
        self._channel.wait(messages)
        self._channel.waits.clear()

    def free(self) -> None:
        """Free the communicator.  Collective, also after a loss."""
        self._transport.settle()
        self._failures.others.remove(self.comm)
        self.comm.Free()


class GradientSum:
    """The sum of buckets of a flat array over the ranks, with the same bits on all ranks.

    The result is also the same in every run.  Each rank receives its share of a bucket from all
    other ranks, adds the shares in the order of ranks, and sends the sum to all.  Each rank sends
    2 (P-1) / P of the bytes, as in a ring all-reduce.  `MPI_Iallreduce` would send as much, but it
    chooses the order of the sum and cannot read device memory.  Collective: all ranks start the
    same buckets in the same order.

    Parameters
    ----------
    comm : Intracomm
        The caller's communicator; a duplicate is used until `free`.
    flat : (n,) array
        Float32 or float64, NumPy or CuPy; sums replace its elements.
    **way
        `transfers` and `failures` of a `Way`.

    Attributes
    ----------
    comm : Intracomm
        The duplicate.
    """

    def __init__(self, comm: MPI.Intracomm, flat: Array, **way: Any) -> None:
        self._flat, self._traffic = flat, Traffic()
        way = Way(self._traffic, device_of(flat), **way)
        self._exchange = ArrayExchange(comm, "gradients", "all", way)
        self.comm = self._exchange.comm
        self._started: list[tuple[slice, Array, Array, list]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has sent so far."""
        return sum(sent for sent, _ in self._traffic.bytes.values())

    def start(self, bucket: slice) -> None:
        """Start to sum a slice of the array, which must not change until `finish`."""
        ranks = self.comm.size
        if ranks == 1:
            return
        values = self._flat[bucket]
        share = -(-len(values) // ranks)
        padded = module_of(values).zeros((ranks, share), values.dtype)
        padded.reshape(-1)[: len(values)] = values
        received = module_of(values).empty_like(padded)
        messages = self._exchange.all_to_all(padded, received, len(self._started))
        self._started.append((bucket, padded, received, messages))

    def finish(self) -> None:
        """Wait until all buckets that were started hold their sums."""
        sent = []
        for tag, (bucket, padded, received, messages) in enumerate(self._started):
            self._exchange.wait(messages)
            total = received[0].copy()
            for rank in range(1, len(received)):
                total += received[rank]
            sent.append((bucket, padded, total, self._exchange.all_gather(total, padded, tag)))
        for bucket, padded, _, messages in sent:
            self._exchange.wait(messages)
            values = self._flat[bucket]
            values[:] = padded.reshape(-1)[: len(values)]
        self._started = []

    def free(self) -> None:
        """Free the communicator.  Collective, also after a loss."""
        self._exchange.free()


def total(comm: MPI.Intracomm, value: T) -> T:
    """Sum a number or array over the ranks, in their order; all ranks get the same bits."""
    return sum(comm.allgather(value))
