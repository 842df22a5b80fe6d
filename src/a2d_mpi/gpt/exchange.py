"""Exchanges of arrays between ranks: posted early, counted, from the memory of any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from a2d_mpi.comm.agreement import Call
from a2d_mpi.comm.channel import Channel, Traffic
from a2d_mpi.comm.device_transport import DeviceTransport
from a2d_mpi.comm.gpus import gpu_aware
from a2d_mpi.comm.survival import NoFailures
from a2d_mpi.comm.transport import HostTransport, Transport
from a2d_mpi.comm.watch import Watch
from a2d_mpi.core.sizes import next_ranks
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device


class Way(NamedTuple):
    """How arrays get to other ranks.

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
