"""Sums of gradients over all ranks, in a fixed order, during the backward pass."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.channel import Traffic
from a2d_mpi.devices import device_of
from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.exchange import ArrayExchange, Way
from a2d_mpi.gpt.layers import module_of

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
