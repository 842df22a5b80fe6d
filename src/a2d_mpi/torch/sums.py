"""Sums over ranks in a fixed order: all ranks get the same bits, in every run."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call
from a2d_mpi.comm.channel import Channel, Traffic
from a2d_mpi.comm.device_transport import DeviceTransport
from a2d_mpi.comm.gpus import gpu_aware
from a2d_mpi.comm.survival import NoFailures
from a2d_mpi.comm.transport import Transport
from a2d_mpi.comm.watch import Watch
from a2d_mpi.core.sizes import next_ranks
from a2d_mpi.devices import device_of
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array

T = TypeVar("T", float, np.ndarray)


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
    failures : NoFailures, optional
        `ProcessGrid.failures` of these ranks, if MPI may continue when one of them dies.

    Attributes
    ----------
    comm : Intracomm
        The duplicate.
    """

    def __init__(
        self, comm: MPI.Intracomm, flat: Array, failures: NoFailures | None = None
    ) -> None:
        self.comm, self._flat, self._device = comm.Dup(), flat, device_of(flat)
        self._failures = failures or NoFailures(comm, [])
        self._failures.others.append(self.comm)
        self._transport = Transport()
        aware, call = True, Call(comm)
        with call.checks():  # both read environment variables, which may differ between nodes
            watch = Watch(self.comm, "sums of gradients", talks=False)
            aware = self._device is HOST or gpu_aware("auto")[0]
        try:
            with self._failures.translated():  # others may wait on the duplicate already
                call.agree()
                staged = not all(comm.allgather(aware))
        except Exception:  # on all ranks
            self.free()
            raise
        if self._device is not HOST:
            self._transport = DeviceTransport(self._device, staged)
        self._traffic = Traffic()
        self._channel = Channel(self.comm, "all", self._traffic)
        self._channel.begin_phase("gradients", self._transport, watch)
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
        shape = ranks, -(-len(values) // ranks)
        padded, received = (self._device.empty(shape, values.dtype) for _ in range(2))
        self._device.zero(padded)
        padded.reshape(-1)[: len(values)] = values
        messages = self._all_to_all(padded, received, len(self._started))
        self._started.append((bucket, padded, received, messages))

    def finish(self) -> None:
        """Wait until all buckets that were started hold their sums."""
        sent = []
        for tag, (bucket, padded, received, messages) in enumerate(self._started):
            self._wait(messages)
            summed = received[0].copy()
            for rank in range(1, len(received)):
                summed += received[rank]
            messages = self._all_to_all([summed] * self.comm.size, padded, tag)
            sent.append((bucket, padded, summed, messages))
        for bucket, padded, _, messages in sent:
            self._wait(messages)
            values = self._flat[bucket]
            values[:] = padded.reshape(-1)[: len(values)]
        self._started = []

    def _all_to_all(self, sent: Array | list[Array], received: Array, tag: int) -> list:
        """Start to send ``sent[p]`` to each rank p, and to receive ``received[p]`` from it."""
        messages, own = [], self.comm.rank
        peers = next_ranks(own, self.comm.size)
        for peer in peers:
            messages += self._channel.irecv([received[peer]], peer, tag)
        for peer in peers:
            messages += self._channel.isend([sent[peer]], peer, tag)
        self._device.put(received[own], sent[own])
        return messages

    def _wait(self, messages: list) -> None:
        """Complete messages, and empty the list."""
        self._channel.wait(messages)
        self._channel.waits.clear()

    def free(self) -> None:
        """Free the communicator.  Collective, also after a loss; a second call does nothing."""
        if self.comm != MPI.COMM_NULL:
            self._transport.settle()
            self._failures.others.remove(self.comm)
            self.comm.Free()


def total(comm: MPI.Intracomm, value: T) -> T:
    """Sum a number or array over the ranks, in their order; all ranks get the same bits."""
    return sum(comm.allgather(value))
