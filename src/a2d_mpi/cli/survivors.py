"""Jobs that go on without lost ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone

from mpi4py import MPI

from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.survival import RanksLost, survives
from a2d_mpi.comm.watch import name_ranks

_NO_ULFM = (
    "--survive: this MPI ends the job when a rank dies; it needs Open MPI with ULFM, started by "
    "mpiexec --with-ft ulfm"
)


def check_survive(comm: MPI.Intracomm, survive: bool) -> None:
    """Refuse --survive on an MPI that ends the job.  Collective.

    Raises
    ------
    CollectiveError
        On all ranks.
    """
    agree(comm, _NO_ULFM if survive and not survives() else None)


def surviving(
    prog: str,
    grid: ProcessGrid,
    work: Callable[[ProcessGrid, MPI.Intracomm], int],
    survive: bool,
    method: str,
) -> int | None:
    """Call `work` on a grid, and again on a smaller grid whenever ranks die.

    Collective.  A line on stderr names the lost ranks.  `work` may be called again even after it
    has returned on some ranks, so it must continue from its own state.

    Parameters
    ----------
    prog : str
        Name of the driver.
    grid : ProcessGrid
        First grid; it is freed.
    work : callable
        ``work(grid, comm)`` returns an exit code; `comm` is a duplicate of ``grid.comm`` for the
        messages of `work`.
    survive : bool
        Whether to continue after a loss.
    method : str
        Method for which the grid shrinks; see `ProcessGrid.shrink`.

    Returns
    -------
    int or None
        Exit code of `work`; None on ranks that are not part of a smaller grid.

    Raises
    ------
    RanksLost
        On all surviving ranks, if `survive` is false.
    """
    while True:
        comm = None
        try:
            with grid.failures.all_or_none():
                comm = grid.comm.Dup()
                grid.failures.others.append(comm)
                code = work(grid, comm)
            comm.Free()
            grid.free()
            return code
        except RanksLost:
            if not survive:
                raise
            start = time.perf_counter()
            smaller = grid.shrink(method)
            if comm is not None:
                comm.Free()
            grid.free()
        if smaller is None:
            return None
        lost = sorted(set(grid.failures.numbers) - set(smaller.failures.numbers))
        grid = smaller
        if grid.comm.rank == 0:
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            print(f"{prog}: {now}: continues without {name_ranks(lost)}: {grid.comm.size} ranks, "
                  f"{grid.layout.shape}, after "
                  f"{time.perf_counter() - start:.3f} s", file=sys.stderr, flush=True)  # fmt: skip
