"""Sums of gradients over all ranks, in a fixed order, while the backward pass goes on."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI


class GradientSum:
    """Sums parts of a flat array over the ranks: the same bits on all of them, and every time.

    Each rank gets its share of a part from all others, adds these up in the order of ranks, and
    sends the sums to all: 2 (P-1) / P of the bytes, as a ring all-reduce.  `MPI_Iallreduce` would
    move as many, but in an order of its own.  Collective; parts must be started in the same order
    on all ranks.

    Parameters
    ----------
    comm : Intracomm
        Of the caller; a duplicate is used, until `free`.
    flat : (n,) ndarray
        Float32 or float64.
    """

    def __init__(self, comm: MPI.Intracomm, flat: np.ndarray) -> None:
        self._comm, self._flat = comm.Dup(), flat
        self._started: list[tuple[slice, np.ndarray, np.ndarray, MPI.Request]] = []
        self.nbytes = 0  # sent by this rank so far

    def start(self, part: slice) -> None:
        """Send a part of the array, which must not change until `finish`."""
        ranks = self._comm.size
        if ranks == 1:
            return
        whole = self._flat[part]
        share = -(-len(whole) // ranks)
        padded = np.zeros((ranks, share), whole.dtype)
        padded.ravel()[: len(whole)] = whole
        received = np.empty_like(padded)
        request = self._comm.Ialltoall(padded, received)
        self._started.append((part, padded, received, request))
        self.nbytes += 2 * (ranks - 1) * share * whole.itemsize

    def finish(self) -> None:
        """Wait until all parts that were started hold their sums."""
        sent = []
        for part, padded, received, request in self._started:
            request.Wait()
            total = received[0].copy()
            for x in received[1:]:
                total += x
            sent.append((part, padded, total, self._comm.Iallgather(total, padded)))
        for part, padded, _, request in sent:
            request.Wait()
            whole = self._flat[part]
            whole[:] = padded.ravel()[: len(whole)]
        self._started = []

    def free(self) -> None:
        """Free the communicator.  Collective."""
        self._comm.Free()


def total(comm: MPI.Intracomm, value: float) -> float:
    """Sum of a number over the ranks, in their order; the same bits on all."""
    return sum(comm.allgather(value))
