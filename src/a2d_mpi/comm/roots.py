"""Work of one rank, whose errors all ranks raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

from a2d_mpi.comm.agreement import Call, CollectiveError


@contextmanager
def errors_of(
    comm: MPI.Intracomm, root: int, kinds: type[Exception] = Exception
) -> Iterator[None]:
    """Raise on all ranks the error of these kinds that rank `root` raises in the context.

    Collective over `comm`.  If the context communicates, `kinds` must be errors that all of its
    ranks raise together.

    Raises
    ------
    CollectiveError
        On all ranks, with the message of the error.
    """
    call = Call(comm)
    with call.checks(kinds):
        yield
    if (problem := comm.bcast(call.problem, root)) is not None:
        raise CollectiveError(problem)
