"""The R x C process grid, and its third axis, the heads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call, CollectiveError
from a2d_mpi.comm.calls import Caller, Calls, PlanCall
from a2d_mpi.comm.survival import NoFailures, ranks_in, survives
from a2d_mpi.comm.watch import Watch
from a2d_mpi.core.layout import Layout


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
    sharing : int
        Ranks of the grid on this node, which share its memory.
    cores : int
        Cores of the node per rank of the grid on this node, at least 1.
    watch : Watch
        Reports of ranks that wait for a long time.
    failures : NoFailures or Failures
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

    Examples
    --------
    >>> from mpi4py import MPI
    >>> grid = ProcessGrid(MPI.COMM_SELF, 1, 1)  # 6 ranks: ProcessGrid(MPI.COMM_WORLD, 2, 3)
    >>> grid.layout.shape, grid.row_comm.size, grid.col_comm.size
    ('1x1x1', 1, 1)
    >>> grid.free()
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
        call, sizes, waiting = Call(comm), (rows, cols, heads), nullcontext()
        with call.checks():
            sizes = _integers("rows, cols and heads", sizes, 3)
            if min(sizes) < 1 or math.prod(sizes) != comm.size:
                shape = f"{rows} x {cols}" + f" x {heads}" * (heads != 1)
                raise ValueError(f"a {shape} grid does not fit {comm.size} ranks")
            block = _integers("block", block, 2)
            nodes = None if nodes is None else _integers("nodes", nodes, comm.size)
            self.layout = Layout(*sizes, order, block)
            # The watch must not talk: only the caller sends messages on `comm`.
            watch = Watch(comm, f"ProcessGrid({rows} x {cols} x {heads})", talks=False)
            waiting = watch.waiting("for all ranks to call it")
        kind = NoFailures
        if survives():
            from a2d_mpi.comm.failures import Failures as kind
        self.failures = kind(comm, [])
        with self.failures.making():
            with waiting:
                arguments = {"rows": rows, "cols": cols, "heads": heads, "order": order}
                call.agree({**arguments, "block": block, "nodes": nodes})
            self._split(comm, nodes)
        self.failures.comm, self.failures.numbers = self.comm, self.layout.world_ranks()
        self.watch = Watch(self.comm)
        self._calls = Calls(self.comm, self.watch, self.failures)

    @classmethod
    def from_layout(
        cls, comm: MPI.Intracomm, layout: Layout, nodes: Sequence[int] | None = None
    ) -> ProcessGrid:
        """Make the grid of a layout, for example of `a2d_mpi.planning.planner.best_candidate`.

        By default, plans on this grid take the distribution of the layout, if it has one.
        Collective over `comm`.

        Parameters
        ----------
        comm : Intracomm
            Communicator whose ranks fill the nodes one after the other.
        layout : a2d_mpi.core.layout.Layout
            The same on all ranks.  Its `nodes` are ignored.
        nodes : sequence of int, optional
            Node of every rank of `comm`, as of a `ProcessGrid`.

        Raises
        ------
        ValueError, RanksLost
            On all ranks, as a `ProcessGrid` raises them.
        """
        grid = cls(comm, layout.rows, layout.cols, layout.heads, layout.order, layout.block, nodes)
        grid.layout = replace(layout, nodes=grid.layout.nodes)
        return grid

    def _split(self, comm: MPI.Intracomm, nodes: Sequence[int] | None) -> None:
        """Make the communicators, and compute the coordinates and the node of this rank.

        All communicators are split from `comm`.  So if any rank dies, all ranks are in a call on
        `comm`, which ends when a rank revokes it.
        """
        self.rows, self.cols, self.heads = self.layout.rows, self.layout.cols, self.layout.heads
        grid_rank = int(np.argsort(self.layout.world_ranks())[comm.rank])
        position, self.head = divmod(grid_rank, self.heads)
        self.row, self.col = divmod(position, self.cols)
        self.comm = self._keep(comm.Split, 0, grid_rank)
        self.group_comm = self._keep(comm.Split, self.head, position)
        self.row_comm = self._keep(comm.Split, self.head * self.rows + self.row, self.col)
        self.col_comm = self._keep(comm.Split, self.head * self.cols + self.col, self.row)
        self.head_comm = self._keep(comm.Split, position, self.head)
        self._channel_comms = {
            tuple(range(self.group_comm.size)): self.group_comm,
            tuple(self.row * self.cols + c for c in range(self.cols)): self.row_comm,
            tuple(r * self.cols + self.col for r in range(self.rows)): self.col_comm,
        }
        node = self._keep(comm.Split_type, MPI.COMM_TYPE_SHARED)
        # The first rank of a node gives the node its number.
        number = ranks_in(comm, node.Get_group())[0]
        usable = getattr(os, "sched_getaffinity", lambda _: set(range(os.cpu_count() or 1)))
        everyone = comm.allgather((number, usable(0)))
        here = [cores for other, cores in everyone if other == number]
        self.sharing = len(here)
        self.cores = max(1, len(set().union(*here)) // len(here))
        self.layout = self.layout.on_nodes(nodes or [x for x, _ in everyone])
        self.failures.comms.pop().Free()  # the communicator of the node

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

    def call(
        self, action: str, plan: Caller, settle: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[PlanCall]:
        """Make a collective call of a plan, or make the plan, in a ``with`` statement::

            with grid.call("forward", plan) as call:
                with call.checks():
                    ...  # work of this rank alone, without communication
                call.agree()
                ...  # messages to other ranks

        The grid is reserved for one call at a time.  Exceptions in the checks are raised in
        `agree` on all ranks.  Later exceptions leave messages under way, and the plan refuses all
        further calls.

        Parameters
        ----------
        action : str
            One of `a2d_mpi.comm.calls.ACTIONS`.
        plan : Caller
        settle : callable
            Completes the messages under way, if a rank dies in the call.

        Returns
        -------
        context manager of a PlanCall

        Raises
        ------
        CollectiveError
            If the grid was freed.  All ranks free a grid together, so all ranks raise this.
        RanksLost
            On all surviving ranks, if a rank died and MPI continues.
        """
        return self._calls.call(action, plan, settle)

    def shrink(self, method: str = "attention2d") -> ProcessGrid | None:
        """Make a grid of the surviving ranks after `RanksLost`; afterwards free this grid.

        Collective over the surviving ranks, which keep their order.  The new U is the greatest
        common divisor of the old U and the number of survivors.  The grid has as many positions as
        `method` can use, in the squarest shape.  All other ranks are idle ("triangle": of 5 ranks,
        3 work and 2 are idle).  If more ranks die during this call, the grid is made without them.

        Parameters
        ----------
        method : str
            One of `a2d_mpi.schedules.method.METHODS`.

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
        from a2d_mpi.comm.failures import shrunk

        return shrunk(self, method)

    def free(self) -> None:
        """Free the communicators.  Collective; the grid cannot be used afterwards."""
        while self.failures.comms:
            self.failures.comms.pop().Free()

    def _keep(self, split: Callable[..., MPI.Intracomm], *args: int) -> MPI.Intracomm:
        try:
            self.failures.comms.append(split(*args))
        except MPI.Exception as error:
            if self.failures.caused(error):
                raise
            self.free()
            raise CollectiveError(
                "MPI has no communicators left: each grid uses five, so free() grids that are no "
                f"longer used ({error.Get_error_string().splitlines()[-1]})"
            ) from None
        return self.failures.comms[-1]

    def __repr__(self) -> str:
        shape = (self.rows, self.cols, self.heads)[: 2 + (self.heads > 1)]
        return f"ProcessGrid({' x '.join(map(str, shape))})"


def _integers(name: str, values: Sequence[int], length: int) -> tuple[int, ...]:
    """Return `length` integers as a tuple; raise ValueError for anything else."""
    numbers = np.array(values, dtype=object)  # objects, because integers may exceed 64 bits
    if numbers.shape != (length,) or not all(isinstance(x, (int, np.integer)) for x in numbers):
        raise ValueError(f"{name} must be {length} integers, got {values!r}")
    return tuple(map(int, numbers))
