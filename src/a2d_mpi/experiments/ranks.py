"""The ranks of a program: their share of their nodes, and jobs that go on without lost ones."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from mpi4py import MPI

from a2d_mpi.comm.agreement import agree
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.survival import RanksLost, survives
from a2d_mpi.comm.watch import name_ranks
from a2d_mpi.core.sizes import check_memory
from a2d_mpi.experiments.cli import together

_NO_ULFM = (
    "--survive: this MPI ends the job when a rank dies; it needs Open MPI with ULFM, started by "
    "mpiexec --with-ft ulfm"
)


class Place:
    """The nodes of all ranks, and the place of this rank.  Collective over `comm`.

    Attributes
    ----------
    hosts : list of str
        Names of the nodes.
    even : bool
        Whether all nodes have equally many ranks.  If not, `partners` is empty.
    ranks_per_node : int
    cores_per_node : float
        Cores that a node may use.  Emulated nodes on one host share its cores.  The environment
        variable ``A2D_MPI_NODE_CORES`` lowers the number, for nodes whose CPU time is limited (by
        a cgroup).
    share : float
        Cores per rank, at most 1.
    memory, sharing : int
        Bytes of memory per rank, and the number of ranks that share the memory of this host.
    partners : dict of str to list of int
        Ranks with which this rank exchanges messages "inside" its node and "between" nodes (one
        rank of each other node).  A key is missing if it has no ranks.  Ranks are in the order of
        a ring, from the rank after this one on.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        boot = Path("/proc/sys/kernel/random/boot_id")
        own = (
            socket.gethostname(),
            boot.read_text() if boot.exists() else socket.gethostname(),
            tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (0,),
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        )
        everyone = comm.allgather(own)
        self.hosts = list(dict.fromkeys(host for host, *_ in everyone))
        nodes = [[r for r, x in enumerate(everyone) if x[0] == host] for host in self.hosts]
        self.even = len({len(ranks) for ranks in nodes}) == 1
        self.ranks_per_node = len(nodes[0])
        cores = {(boot, core) for _, boot, usable, _ in everyone for core in usable}
        limit = float(os.environ.get("A2D_MPI_NODE_CORES") or "inf")
        self.cores_per_node = min(len(cores) / len(nodes), limit)
        self.sharing = sum(x[1] == own[1] for x in everyone)
        self.memory = own[3] // self.sharing
        self.share = min(1.0, self.cores_per_node / self.ranks_per_node)
        node = self.hosts.index(own[0])
        local = nodes[node].index(comm.rank)
        self.partners = {}
        if self.even and self.ranks_per_node > 1:
            self.partners["inside"] = nodes[node][local + 1 :] + nodes[node][:local]
        if self.even and len(nodes) > 1:
            self.partners["between"] = [x[local] for x in nodes[node + 1 :] + nodes[:node]]


def check_room(comm: MPI.Intracomm, what: str, nbytes: int, ranks: int | None = None) -> None:
    """Refuse work for which a node has too little memory, before anything is allocated for it.

    Collective over `comm`.

    Parameters
    ----------
    comm : Intracomm
    what : str
        Name of the arrays for the message, in the plural.
    nbytes : int
        Bytes of the arrays on one rank.
    ranks : int, optional
        Number of ranks that have these arrays.  Default: all.

    Raises
    ------
    CollectiveError
        On all ranks, if the memory does not suffice.
    """
    sharing = min(Place(comm).sharing, comm.size if ranks is None else ranks)
    together(comm, lambda: check_memory(what, nbytes, sharing))


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
