"""Messages between all ranks: each rank sends an array to each other one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from a2d_mpi.comm.survival import NoFailures
from a2d_mpi.core.sizes import next_ranks

TAG = 32766  # of no plan and no report of waiting ranks, which may be on their way on `comm`


def exchange(
    comm: MPI.Intracomm, failures: NoFailures, sent: Sequence[Any], received: Sequence[Any]
) -> None:
    """Send an array to each rank, and receive one from each.  Collective.

    Unlike a collective call of MPI, it gives no rank garbage if another one dies.

    Parameters
    ----------
    comm : Intracomm
    failures : NoFailures
        `ProcessGrid.failures` of these ranks.
    sent, received : sequence of array or tensor
        For each rank; empty ones are not sent.
    """
    rank, messages = comm.rank, []
    if len(received[rank]):
        received[rank][...] = sent[rank]

    def settle() -> None:
        for x in messages:
            with suppress(MPI.Exception):
                x.Wait()

    with failures.translated(settle):
        for post, arrays in ((comm.Irecv, received), (comm.Isend, sent)):
            peers = [x for x in next_ranks(rank, comm.size) if len(arrays[x])]
            messages += [post(arrays[x], x, TAG) for x in peers]
        for x in messages:  # not Waitall: see Transport
            x.Wait()
