"""The R x C process grid, and its third axis, the heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.agreement import CollectiveError, agree, decide, message_of
from a2d_mpi.comm.failures import Failures, RanksLost, shrunk, survives
from a2d_mpi.comm.rendezvous import Rendezvous
from a2d_mpi.comm.threads import cores_of_rank
from a2d_mpi.comm.watch import Watch
from a2d_mpi.core.sizes import Layout, squarest
from a2d_mpi.schedules import METHODS

if TYPE_CHECKING:
    from a2d_mpi.planning.machine import Machine
    from a2d_mpi.schedules.problem import Workload


class ProcessGrid:
    """P = rows x cols x heads ranks: a grid with a Ulysses group of ranks at each position.

    With ``heads`` 1 a Ulysses group is one rank::

        R = 2, C = 3        col 0     col 1     col 2
                 row 0   [ rank 0 | rank 1 | rank 2 ]  <- row_comm: gather Q, reduce out
                 row 1   [ rank 3 | rank 4 | rank 5 ]
                            ^ col_comm: gather K, V; in the backward pass reduce dK, dV

    With ``heads`` U > 1 a *Ulysses group* is U ranks, and rank ``(r C + c) U + u`` is the u-th
    rank of the Ulysses group at position (r, c).  The ranks of a Ulysses group exchange tokens for
    heads.  The u-th ranks of all Ulysses groups form a *context-parallel group*.  It is a grid as
    above, for 1/U of the heads.  R = C = 1 is DeepSpeed-Ulysses (arXiv:2309.14509).

    Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Communicator of exactly ``rows * cols * heads`` ranks.  The grid duplicates it, so messages
        of the grid and of the caller do not interfere.
    rows, cols, heads : int
        R, C and U, all at least 1.
    order : str
        A permutation of "rcu": the axes from the slowest to the fastest varying rank of `comm`.
        Consecutive ranks of `comm` are usually on one node.  With the default, "rcu", they form a
        Ulysses group.  The ranks of the grid itself are numbered as above for every order.
    block : (int, int)
        Rows and columns of the node blocks into which the grid is divided.  Consecutive ranks of
        `comm` fill a block, row by row, and then the next block along the last axis of `order`.
    nodes : sequence of int, optional
        Node of every rank of `comm`.  Default: ranks that share memory are on one node.

    Attributes
    ----------
    comm : Intracomm
        All ranks of the grid, by grid rank.
    row_comm : Intracomm
        The C ranks of this rank's row and context-parallel group, by column.
    col_comm : Intracomm
        The R ranks of this rank's column and context-parallel group, by row.
    head_comm : Intracomm
        The U ranks of this rank's Ulysses group.
    group_comm : Intracomm
        The R C ranks of this rank's context-parallel group, by ``r C + c``.
    rows, cols, heads, row, col, head : int
        R, C, U, and the coordinates of this rank.
    cores : int
        Cores of the node per rank of the grid on this node, at least 1.
    rendezvous : Rendezvous
        The ranks of the grid meet in it before each collective call.
    failures : Failures
        Detection of ranks that died, if MPI continues without them.

    Raises
    ------
    ValueError
        On all ranks, if rows x cols x heads is not the size of `comm`, if `order` is not a
        permutation of "rcu", or if an argument differs between ranks.  Also if the blocks do not
        divide the grid, `nodes` does not have an integer for each rank of `comm`, or MPI has no
        communicators left.
    RanksLost
        On all surviving ranks, if a rank died and MPI continues.  All calls of plans raise this
        error, too.  If the rank died while the grid was made, `comm` is revoked.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        rows: int,
        cols: int,
        heads: int = 1,
        order: str = "rcu",
        block: tuple[int, int] = (1, 1),
        nodes: Sequence[int] | None = None,
    ) -> None:
        problem, sizes, waiting = None, (rows, cols, heads), nullcontext()
        try:
            if not all(isinstance(x, (int, np.integer)) for x in sizes):
                got = "{!r}, {!r} and {!r}".format(*sizes)
                raise ValueError(f"rows, cols and heads must be integers, got {got}")
            if min(sizes) < 1 or math.prod(map(int, sizes)) != comm.size:
                shape = f"{rows} x {cols}" + f" x {heads}" * (heads != 1)
                raise ValueError(f"a {shape} grid does not fit {comm.size} ranks")
            block = _integers("block", block, 2)
            nodes = None if nodes is None else _integers("nodes", nodes, comm.size)
            self.layout = Layout(int(rows), int(cols), int(heads), order, block)
            # The watch must not talk: only the caller sends messages on `comm`.
            watch = Watch(comm, f"ProcessGrid({rows} x {cols} x {heads})", talks=False)
            waiting = watch.waiting("for all ranks to call it")
        except Exception as error:  # of any kind: all ranks must raise it
            problem = message_of(error)
        self._comms: list[MPI.Intracomm] = []
        self.failures = Failures(comm, self._comms)
        try:
            with self.failures.all_or_none():
                with waiting:
                    arguments = {"rows": rows, "cols": cols, "heads": heads, "order": order}
                    agree(comm, problem, {**arguments, "block": block, "nodes": nodes})
                grid_rank = int(np.argsort(self.layout.world_ranks())[comm.rank])
                self.comm = self._keep(comm.Split, 0, grid_rank)
        except RanksLost:
            self.free()
            comm.Shrink().Free()  # see `shrunk`: COMM_SELF may be younger than `comm`
            raise
        try:
            with self.failures.all_or_none():
                self._split(grid_rank)
            with self.failures.all_or_none():  # after all ranks have made all communicators
                self._place(comm, nodes)
        except RanksLost:
            self.free()
            raise
        self.failures.comm = self.comm
        self.failures.numbers = self.layout.world_ranks()
        self.rendezvous = Rendezvous(self.comm, self.failures)

    def _split(self, grid_rank: int) -> None:
        """Make the other communicators, and compute the coordinates of this rank."""
        self.rows, self.cols, self.heads = self.layout.rows, self.layout.cols, self.layout.heads
        position, self.head = divmod(grid_rank, self.heads)
        self.row, self.col = divmod(position, self.cols)
        self.group_comm = self._keep(self.comm.Split, self.head, position)
        # Split `comm`, not `group_comm`: if any rank dies, all ranks are in this call and notice.
        lines = self.head * self.rows + self.row, self.head * self.cols + self.col
        self.row_comm = self._keep(self.comm.Split, lines[0], self.col)
        self.col_comm = self._keep(self.comm.Split, lines[1], self.row)
        self.head_comm = self._keep(self.comm.Split, position, self.head)
        self._channel_comms = {
            tuple(range(self.group_comm.size)): self.group_comm,
            tuple(self.row * self.cols + c for c in range(self.cols)): self.row_comm,
            tuple(r * self.cols + self.col for r in range(self.rows)): self.col_comm,
        }
        self._keep(self.comm.Split_type, MPI.COMM_TYPE_SHARED)

    def _place(self, comm: MPI.Intracomm, nodes: Sequence[int] | None) -> None:
        """Set the node of every rank; free the communicator of this node, which was made last."""
        node = self._comms[-1]
        self.cores = cores_of_rank(node)
        # The first rank of a node gives the node its number.
        nodes = nodes or comm.allgather(node.bcast(comm.rank))
        self.layout = self.layout.on_nodes(nodes)
        self._comms.pop().Free()

    @classmethod
    def auto(
        cls,
        comm: MPI.Intracomm,
        machine: Machine,
        work: Workload,
        memory: int | None = None,
        method: str = "attention2d",
    ) -> ProcessGrid:
        """Make the grid that the planner predicts to be the fastest for a problem on a machine.

        Collective over `comm`; rank 0 runs `a2d_mpi.planning.planner`.  By default, plans on this
        grid take the distribution of the fastest plan.

        Parameters
        ----------
        comm : Intracomm
            Communicator whose ranks fill the machine's nodes one after the other.
        machine : a2d_mpi.planning.machine.Machine
        work : a2d_mpi.schedules.problem.Workload
        memory : int, optional
            Bytes of memory per rank.  Default: the memory in the machine's profile.
        method : str
            One of `a2d_mpi.schedules.METHODS`.

        Returns
        -------
        ProcessGrid

        Raises
        ------
        ValueError
            On all ranks, if no plan fits in memory or the problem is invalid.
        RanksLost
            On all surviving ranks, if a rank died and MPI continues.
        """
        from a2d_mpi.planning.planner import best_candidate

        with Failures(comm, []).all_or_none():
            options = machine, comm.size, work, memory, (method,)
            layout = decide(comm, 0, lambda: best_candidate(*options).layout)
        grid = cls(comm, layout.rows, layout.cols, layout.heads, layout.order, layout.block)
        grid.layout = replace(grid.layout, distribution=layout.distribution)
        return grid

    def comm_of(self, channel: str, ranks: tuple[int, ...]) -> MPI.Intracomm:
        """Return the communicator of a channel of this rank.

        Rows, columns, the context-parallel group and the Ulysses group have communicators.  Any
        other channel gets a communicator at the first call, which is collective over `ranks`.

        Parameters
        ----------
        channel : str
            Name of the channel; "head" is the Ulysses group.
        ranks : tuple of int
            Ranks of the channel, in its order.  They are ranks in the context-parallel group, or
            all ranks of the grid.  Ignored for "head".

        Returns
        -------
        Intracomm
            It belongs to the grid, which frees it.
        """
        if channel == "head":
            return self.head_comm
        if ranks not in self._channel_comms:
            parent = self.comm if len(ranks) > self.group_comm.size else self.group_comm
            made = self._keep(lambda: parent.Create_group(parent.group.Incl(ranks)))
            self._channel_comms[ranks] = made
        return self._channel_comms[ranks]

    def shrink(self, method: str = "attention2d") -> ProcessGrid | None:
        """Make a grid of the surviving ranks after `RanksLost`; afterwards free this grid.

        Collective over the surviving ranks, which keep their order.  The new U is the greatest
        common divisor of the old U and the number of survivors.  The grid has as many positions as
        `method` can use, in the squarest shape.  All other ranks are idle ("triangle": of 5 ranks,
        3 work and 2 are idle).  If more ranks die during this call, the grid is made without them.

        Parameters
        ----------
        method : str
            One of `a2d_mpi.schedules.METHODS`.

        Returns
        -------
        ProcessGrid or None
            None on an idle rank.  ``failures.numbers[i]`` of the new grid is the rank that its
            rank i had in the communicator of the first grid.

        Raises
        ------
        RuntimeError
            If MPI ends jobs when a rank dies.
        """
        if not survives():
            raise RuntimeError(
                "a grid can shrink only if MPI continues when a rank dies: use Open MPI and start "
                "the job by mpiexec --with-ft ulfm"
            )
        most_positions = METHODS[method].most_positions
        while True:
            left = shrunk(self.comm)
            try:
                return self._shrunk(left, most_positions)
            except RanksLost:  # another rank died: all survivors try again
                continue
            finally:
                left.Free()

    def _shrunk(
        self, left: MPI.Intracomm, most_positions: Callable[[int], int]
    ) -> ProcessGrid | None:
        """Make the grid of `shrink` from the ranks of a communicator."""
        everyone, remaining = self.comm.Get_group(), left.Get_group()
        ranks = np.array(MPI.Group.Translate_ranks(remaining, None, everyone))  # of this grid
        everyone.Free()
        remaining.Free()
        numbers = np.array(self.failures.numbers)[ranks]
        order = np.argsort(numbers)
        heads = math.gcd(self.heads, left.size)
        used = order[: most_positions(left.size // heads) * heads]
        nodes = np.array(self.layout.nodes or range(self.comm.size))[ranks[used]]
        grid, made = None, []
        failures = Failures(left, made)
        color = 0 if left.rank in used else MPI.UNDEFINED
        try:
            with failures.all_or_none():
                active = left.Split(color, int(numbers[left.rank]))
                made += [active] * (active != MPI.COMM_NULL)
            with failures.all_or_none():
                if made:
                    shape = squarest(len(used) // heads)
                    grid = ProcessGrid(active, *shape, heads, self.layout.order, nodes=nodes)
                    distribution = self.layout.distribution
                    grid.layout = replace(grid.layout, distribution=distribution)
                    grid.failures.numbers = numbers[used][grid.layout.world_ranks()]
        except RanksLost:
            if grid:
                grid.free()
            raise
        finally:
            for comm in made:
                comm.Free()
        return grid

    def free(self) -> None:
        """Free the communicators.  Collective; the grid cannot be used afterwards."""
        while self._comms:
            self._comms.pop().Free()

    def _keep(self, split: Callable[..., MPI.Intracomm], *args: int) -> MPI.Intracomm:
        try:
            self._comms.append(split(*args))
        except MPI.Exception as error:
            if self.failures.caused(error):
                raise
            self.free()
            raise CollectiveError(
                "MPI has no communicators left: each grid uses five, so free() grids that are no "
                f"longer used ({error.Get_error_string().splitlines()[-1]})"
            ) from None
        return self._comms[-1]

    def __repr__(self) -> str:
        heads = f" x {self.heads}" * (self.heads > 1)
        return f"ProcessGrid({self.rows} x {self.cols}{heads})"


def _integers(name: str, values: Sequence[int], length: int) -> tuple[int, ...]:
    """Return `length` integers as a tuple; raise ValueError for anything else."""
    numbers = np.array(values, dtype=object)  # objects, because integers may exceed 64 bits
    if numbers.shape != (length,) or not all(isinstance(x, (int, np.integer)) for x in numbers):
        raise ValueError(f"{name} must be {length} whole numbers, got {values!r}")
    return tuple(map(int, numbers))
