"""Survival: whether the job goes on when ranks die, and what a grid does if not: nothing.

`a2d_mpi.comm.failures` has the rest, for an MPI that continues without dead ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from mpi4py import MPI

from a2d_mpi.comm.watch import name_ranks


class RanksLost(RuntimeError):
    """Ranks of a grid died.  All survivors raise this; `ProcessGrid.shrink` makes their new grid.

    Attributes
    ----------
    ranks : tuple of int
        Ranks that this rank knows to be dead.  The numbers are ranks of the communicator from
        which the grid was made.  After `shrink` they are ranks of the communicator of the first
        grid.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(f"{name_ranks(ranks) if ranks else 'a rank'} died")
        self.ranks = ranks


def survives() -> bool:
    """Return True if this job continues when ranks die: Open MPI under ``mpiexec --with-ft ulfm``.

    MPI has no function for this question.  Open MPI always has the functions of ULFM, but it ends
    the job unless this parameter is set.  MPICH does not have these functions.
    """
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112


class NoFailures:
    """The hooks of `a2d_mpi.comm.failures.Failures`, on an MPI that ends the job if a rank dies.

    Parameters
    ----------
    comm : Intracomm
        Communicator of all ranks of the grid.
    comms : list of Intracomm
        The communicators of the grid, which updates the list.

    Attributes
    ----------
    comm, comms
        As above.  `comm` may be replaced by another communicator of the same ranks.
    others : list of Intracomm
        Communicators of the caller, which are revoked with the grid's.  The caller updates it.
    numbers : sequence of int
        Number in `RanksLost.ranks` of each rank of `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, comms: list[MPI.Intracomm]) -> None:
        self.comm, self.comms, self.numbers = comm, comms, range(comm.size)
        self.others: list[MPI.Intracomm] = []

    def caused(self, error: Exception) -> bool:
        return False

    def translated(self, settle: Callable[[], None] = lambda: None) -> AbstractContextManager:
        return nullcontext()

    def all_or_none(self) -> AbstractContextManager:
        return nullcontext()

    making = all_or_none


def ranks_in(comm: MPI.Intracomm, group: MPI.Group) -> list[int]:
    """Return the ranks in a communicator of the members of a group; free the group."""
    everyone = comm.Get_group()
    ranks = MPI.Group.Translate_ranks(group, None, everyone)
    group.Free()
    everyone.Free()
    return ranks
