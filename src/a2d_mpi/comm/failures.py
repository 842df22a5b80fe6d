"""Ranks that die, on an MPI that continues without them (ULFM, User-Level Failure Mitigation).

MPI reports the death of a rank only to ranks that wait for it.  A rank that gets the report
revokes all communicators of its grid.  This ends all waits on these communicators.  The ranks that
waited revoke their communicators in turn.  So all survivors raise `RanksLost`, no matter which
rank each of them waits for.

The rest of the package calls two hooks: `Failures.translated` makes errors of MPI `RanksLost`, and
`Failures.revoke` ends all waits.  `Failures.all_or_none` is made of both and of an agreement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.agreement import CollectiveError
from a2d_mpi.comm.survival import NoFailures, RanksLost, ranks_in, survives
from a2d_mpi.core.sizes import squarest
from a2d_mpi.schedules.method import METHODS

if TYPE_CHECKING:
    from a2d_mpi.comm.grid import ProcessGrid

_DELAY = 2.0  # seconds after a revocation in which a rank learns which ranks died
_PAUSE = 0.1  # seconds without a report, after which the list of dead ranks is complete
_LOSSES = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}


class Failures(NoFailures):
    """Detection of ranks of a grid that died, and the reports to all other ranks.

    Parameters
    ----------
    comm : Intracomm
        Communicator of all ranks of the grid.  It is revoked, too, because a rank may wait on it
        for a rank that has raised the error already.
    comms : list of Intracomm
        The communicators of the grid; all are revoked if a rank dies.  The grid updates the list.

    Attributes
    ----------
    comm, comms
        As above.  `comm` may be replaced by another communicator of the same ranks.
    numbers : sequence of int
        Number in `RanksLost.ranks` of each rank of `comm`.
    """

    # Whether all ranks have agreed that one died, and the dead ranks of the latest error.
    _over, _reported = False, ()

    def lost(self) -> tuple[int, ...]:
        """Return the numbers of the ranks that this rank knows to be dead."""
        ranks = ranks_in(self.comm, self.comm.Get_failed())
        return tuple(sorted(int(self.numbers[rank]) for rank in ranks))

    def caused(self, error: Exception) -> bool:
        """Return True if an error comes from the death of a rank.

        Any kind of error may come from a death.  If a rank dies in a collective call, the call may
        return garbage on other ranks without an error, and the garbage may cause any exception.
        """
        if not survives():
            return False
        told = isinstance(error, MPI.Exception) and error.Get_error_class() in _LOSSES
        lost = told or isinstance(error, RanksLost) or self.lost() != ()
        return lost or any(comm.Is_revoked() for comm in self._all())

    @contextmanager
    def translated(self, settle: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Raise `RanksLost` in place of an error of the context that comes from a rank's death.

        Before that, revoke the communicators and call `settle`, which completes the messages under
        way.
        """
        try:
            yield
        except Exception as error:
            if self.caused(error):
                self.revoke()
                settle()
                raise self._named() from error
            raise

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raise `RanksLost` on all ranks of `comm` if the context raises it on any rank.

        Otherwise some ranks may complete a collective call in which other ranks notice a death.
        Collective over `comm`.  If MPI ends jobs when a rank dies, nothing is sent.  Contexts may
        be nested.
        """
        problem = None
        try:
            with self.translated():
                yield
        except (RanksLost, CollectiveError) as error:
            problem = error  # other errors end the job, so no rank waits for this one
        lost = isinstance(problem, RanksLost)
        # One rank may be in an inner context while another rank has left the outer one.  Both
        # take part in the same agreement.  It is the last one, so that no rank waits for a second
        # agreement in the outer context.
        if survives() and not self._over:
            try:
                self._over = not self.comm.Agree(int(not lost))
            except MPI.Exception:  # on all ranks
                self._over = True
        if self._over:
            self.revoke()
            raise problem if lost else self._named()
        if problem:
            raise problem

    @contextmanager
    def making(self) -> Iterator[None]:
        """Make the communicators `comms` in the context; if a rank dies, free them on all ranks.

        `comm` must be the parent of all of them.  Otherwise as `all_or_none`.
        """
        try:
            with self.all_or_none():
                yield
        except RanksLost:
            while self.comms:
                self.comms.pop().Free()
            # See `survivors`.  COMM_SELF may be younger than `comm`.
            self.comm.Shrink().Free()
            raise

    def revoke(self) -> None:
        """Revoke the communicators, which ends all waits on them on all ranks."""
        for comm in self._all():
            comm.Revoke()

    def _all(self) -> Sequence[MPI.Intracomm]:
        return [self.comm, *self.comms, *self.others]

    def _named(self) -> RanksLost:
        """Make the error when no further death has been reported for a while.

        A revocation may arrive before the report of a death.  The ranks of a node die together,
        but their deaths may be reported one after the other.
        """
        ranks = self._reported
        until = time.monotonic() + (_DELAY if ranks == () else 0)
        while (known := self.lost()) != ranks or time.monotonic() < until:
            if known != ranks:
                ranks, until = known, time.monotonic() + _PAUSE
            MPI.COMM_SELF.Iprobe()  # lets MPI work
            time.sleep(0.001)
        self._reported = ranks
        return RanksLost(ranks)


def survivors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks of `comm` that are alive; collective over them."""
    # In Open MPI 5.0.11, if a communicator cannot be created because a rank died, later creations
    # hang.  They hang until a creation succeeds whose parent has at most the context id of the
    # failed one's parent.  COMM_SELF has the lowest id of the possible parents here, because
    # `Failures.making` shrinks the parent of a new grid.
    MPI.COMM_SELF.Dup().Free()
    return comm.Shrink()


def shrunk(grid: ProcessGrid, method: str) -> ProcessGrid | None:
    """Do the work of `ProcessGrid.shrink`."""
    while True:
        left = survivors(grid.comm)
        try:
            return _grid_on(left, grid, method)
        except RanksLost:  # another rank died: all survivors try again
            continue
        finally:
            left.Free()


def _grid_on(left: MPI.Intracomm, old: ProcessGrid, method: str) -> ProcessGrid | None:
    """Make a smaller grid on the ranks `left` of an old one; return None on idle ranks."""
    ranks = np.array(ranks_in(old.comm, left.Get_group()))
    numbers = np.array(old.failures.numbers)[ranks]
    heads = math.gcd(old.heads, left.size)
    used = np.argsort(numbers)[: METHODS[method].most_positions(left.size // heads) * heads]
    rows, cols = squarest(len(used) // heads)
    nodes = np.array(old.layout.nodes or range(old.comm.size))[ranks[used]]
    layout = replace(old.layout, rows=rows, cols=cols, heads=heads, block=(1, 1), nodes=None)
    grid, failures = None, Failures(left, [])
    try:
        with failures.all_or_none():
            color = 0 if left.rank in used else MPI.UNDEFINED
            active = left.Split(color, int(numbers[left.rank]))
            failures.comms += [active] * (active != MPI.COMM_NULL)
        with failures.all_or_none():  # now all ranks can revoke the communicator
            if failures.comms:
                grid = type(old).from_layout(active, layout, nodes)
                grid.failures.numbers = numbers[used][layout.world_ranks()]
    except RanksLost:
        if grid:
            grid.free()
        raise
    finally:
        for comm in failures.comms:
            comm.Free()
    return grid
