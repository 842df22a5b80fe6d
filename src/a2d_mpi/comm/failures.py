"""Ranks that die, on an MPI that goes on without them (ULFM, User-Level Failure Mitigation).

MPI tells only the ranks that wait for a dead rank.  Whoever is told revokes all communicators of
the grid.  Then every wait on these ends, and those ranks revoke theirs: so all survivors raise
`RanksLost`, whatever each of them waits for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mpi4py import MPI

from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.comm.watch import name_ranks

_TOLD = 2.0  # seconds in which a rank that saw a revocation hears who died
_LOSSES = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}


class RanksLost(RuntimeError):
    """Ranks of a grid died.  All others raise this; then `ProcessGrid.shrink` goes on with them.

    Attributes
    ----------
    ranks : tuple of int
        Ranks that this rank knows to be dead, by the numbers of the communicator from which the
        grid was made; of a grid that `shrink` made, by those of the first grid's.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(f"{name_ranks(ranks) if ranks else 'a rank'} died")
        self.ranks = ranks


def survives() -> bool:
    """Tell whether this job goes on when ranks die: Open MPI under ``mpiexec --with-ft ulfm``.

    MPI has no function that says so.  Open MPI's has the functions of ULFM always, and ends the
    job all the same unless this parameter of it is set; MPICH has none of them.
    """
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112


class Failures:
    """Notices that ranks of a grid died, and tells the others.

    Parameters
    ----------
    comm : Intracomm
        Of all ranks of the grid.  It is revoked, too: a rank may wait on it for one that has left.
    comms : list of Intracomm
        The grid's communicators, all of which are revoked.  The grid keeps the list up to date.

    Attributes
    ----------
    comm, comms
        As above; another communicator of the same ranks may take the place of `comm`.
    others : list of Intracomm
        Communicators of the caller that are to be revoked, too.
    numbers : sequence of int
        For each rank of `comm` its number in `RanksLost.ranks`.
    """

    def __init__(self, comm: MPI.Intracomm, comms: list[MPI.Intracomm]) -> None:
        self.comm, self.comms, self.numbers = comm, comms, range(comm.size)
        self.others: list[MPI.Intracomm] = []
        self._over = False  # all ranks have agreed that one died

    def duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """A duplicate of a communicator of these ranks, which is revoked with the grid's.

        Collective over `comm`; `forget` frees it.
        """
        made = comm.Dup()
        self.others.append(made)
        return made

    def forget(self, comm: MPI.Intracomm) -> None:
        """Free what `duplicate` has made.  Collective."""
        self.others.remove(comm)
        comm.Free()

    def lost(self) -> tuple[int, ...]:
        """Numbers of the ranks that this rank knows to be dead."""
        failed, everyone = self.comm.Get_failed(), self.comm.Get_group()
        ranks = MPI.Group.Translate_ranks(failed, None, everyone)
        failed.Free()
        everyone.Free()
        return tuple(sorted(int(self.numbers[rank]) for rank in ranks))

    def caused(self, error: Exception) -> bool:
        """Tell whether an error comes from a rank that died.

        Any may: a collective call of which a rank died can end without an error elsewhere, with
        bytes that cannot be read.
        """
        if not survives():
            return False
        if isinstance(error, RanksLost):
            return True
        if isinstance(error, MPI.Exception) and error.Get_error_class() in _LOSSES:
            return True
        return any(comm.Is_revoked() for comm in self._all()) or self.lost() != ()

    @contextmanager
    def noticed(self, settle: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Raise `RanksLost` for errors in the block that come from a rank that died.

        The communicators are revoked first, and `settle` is called: it completes messages that
        the block has left under way.  Other errors pass.
        """
        try:
            yield
        except Exception as error:
            if not self.caused(error):
                raise
            self.revoke()
            settle()
            raise self._named() from error

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raise `RanksLost` on all ranks of `comm` after the block if it ended so on any.

        Without it, some ranks may complete a collective call in which others see a rank die.
        Collective over `comm`.  Without such an MPI, nothing is sent.  Blocks may be nested.
        """
        problem = None
        try:
            with self.noticed():
                yield
        except (RanksLost, CollectiveError) as error:
            problem = error  # other errors end the job: nobody waits for this rank
        lost = isinstance(problem, RanksLost)
        # One rank may be in an inner block while another one has left the outer one.  These meet
        # in one agreement.  It is the last: nobody waits in the outer block for a second one.
        if survives() and not self._over:
            self._over = not _agreed(self.comm, not lost)
        if self._over:
            self.revoke()
            raise problem if lost else self._named()
        if problem:
            raise problem

    def revoke(self) -> None:
        """End all waits on the communicators, on all ranks."""
        for comm in self._all():
            comm.Revoke()

    def _all(self) -> Sequence[MPI.Intracomm]:
        return [self.comm, *self.comms, *self.others]

    def _named(self) -> RanksLost:
        """The error; a revocation may be here before the name of the rank."""
        until = time.monotonic() + _TOLD
        while not (ranks := self.lost()) and time.monotonic() < until:
            MPI.COMM_SELF.Iprobe()  # lets MPI work
            time.sleep(0.001)
        return RanksLost(ranks)


def shrunk(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator of those of `comm` that are left; collective over them."""
    # In Open MPI 5.0.11 a communicator that was not made, because a rank died, bars the making of
    # others, until one is made of a communicator that is older than its parent.  Only COMM_WORLD
    # is older than this one.
    MPI.COMM_SELF.Dup().Free()
    return comm.Shrink()


def _agreed(comm: MPI.Intracomm, done: bool) -> bool:
    """Whether all ranks are done, and alive; the same on all."""
    try:
        return bool(comm.Agree(int(done)))
    except MPI.Exception:
        return False
