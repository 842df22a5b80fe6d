"""The R x C process grid, and its third axis, the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm import agree
from a2d_mpi.cost import Layout

if TYPE_CHECKING:
    from a2d_mpi.machine import Machine
    from a2d_mpi.schedule import Workload


class ProcessGrid:
    """P = rows x cols x heads ranks: a grid of cells of ranks that share the heads.

        R = 2, C = 3        col 0     col 1     col 2
                 row 0   [ rank 0 | rank 1 | rank 2 ]  <- row_comm: gather Q, reduce out
                 row 1   [ rank 3 | rank 4 | rank 5 ]
                            ^ col_comm: gather K, V; in the backward pass reduce dK, dV

    With ``heads`` U > 1 a cell is U ranks, and rank ``(r C + c) U + u`` is the u-th of cell
    (r, c).  They exchange tokens for heads; then the u-th ranks of all cells, a *layer*, are a
    grid like the one above for 1/U of the heads.  R = C = 1 is DeepSpeed-Ulysses
    (arXiv:2309.14509).

    Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Of exactly ``rows * cols * heads`` ranks.  It is duplicated: the grid's messages never meet
        the caller's.
    rows, cols, heads : int
        R, C and U, all at least 1.
    order : str
        A permutation of "rcu": these axes from the slowest to the fastest varying rank of `comm`.
        Neighbouring ranks of `comm` are usually on one node: with the default, "rcu", these are
        the ranks of a cell.  The grid's own ranks are numbered as above whatever the order.

    Attributes
    ----------
    comm : Intracomm
        All ranks of the grid, by the grid's numbers.
    row_comm : Intracomm
        The ranks of my row and layer, size C, my rank in it is my column.
    col_comm : Intracomm
        The ranks of my column and layer, size R, my rank in it is my row.
    head_comm : Intracomm
        The ranks of my cell, size U.
    layer_comm : Intracomm
        The ranks of my layer, size R C, my rank in it is ``r C + c``.
    rows, cols, heads, row, col, head : int
        R, C, U and my coordinates.

    Raises
    ------
    ValueError
        On all ranks, if rows x cols x heads is not the size of `comm`, order is none, or one of
        them differs between ranks.
    """

    def __init__(
        self, comm: MPI.Intracomm, rows: int, cols: int, heads: int = 1, order: str = "rcu"
    ) -> None:
        problem, sizes = None, (rows, cols, heads)
        whole = all(isinstance(x, (int, np.integer)) for x in sizes)
        if not whole or min(sizes) < 1 or rows * cols * heads != comm.size:
            shape = f"{rows} x {cols}" + f" x {heads}" * (heads != 1)
            problem = f"a {shape} grid does not fit {comm.size} ranks"
        elif sorted(str(order)) != ["c", "r", "u"]:
            problem = f"order must be a permutation of 'rcu', got {order!r}"
        agree(comm, problem, {"rows": rows, "cols": cols, "heads": heads, "order": order})
        self.layout = Layout(int(rows), int(cols), int(heads), order)
        self.rows, self.cols, self.heads = rows, cols, heads
        logical = int(np.argsort(self.layout.physical())[comm.rank])
        self.comm = comm.Split(key=logical)
        cell, self.head = divmod(logical, heads)
        self.row, self.col = divmod(cell, cols)
        self.layer_comm = self.comm.Split(color=self.head, key=cell)
        self.row_comm = self.layer_comm.Split(color=self.row, key=self.col)
        self.col_comm = self.layer_comm.Split(color=self.col, key=self.row)
        self.head_comm = self.comm.Split(color=cell, key=self.head)

    @classmethod
    def auto(
        cls,
        comm: MPI.Intracomm,
        machine: Machine,
        work: Workload,
        memory: int | None = None,
        method: str = "attention2d",
    ) -> ProcessGrid:
        """The grid that `a2d_mpi.planner` finds the fastest for a problem on a machine.

        Collective over `comm`; rank 0 plans.

        Parameters
        ----------
        comm : Intracomm
            Its ranks fill the machine's nodes one after the other.
        machine : a2d_mpi.machine.Machine
        work : a2d_mpi.schedule.Workload
        memory : int, optional
            Bytes of a rank; default: what the machine says.
        method : str
            One of `a2d_mpi.cost.METHODS`.

        Raises
        ------
        ValueError
            On all ranks, if no grid fits.
        """
        from a2d_mpi.planner import best_plan

        layout, problem = None, None
        if comm.rank == 0:
            try:
                layout = best_plan(machine, comm.size, work, memory, (method,)).layout
            except Exception as error:  # whatever it is, the other ranks must hear of it
                problem = str(error) or type(error).__name__
        agree(comm, problem)
        layout = comm.bcast(layout)
        return cls(comm, layout.rows, layout.cols, layout.heads, layout.order)

    def free(self) -> None:
        """Free the communicators.  Collective; the grid cannot be used afterwards."""
        for comm in (self.row_comm, self.col_comm, self.head_comm, self.layer_comm, self.comm):
            comm.Free()

    def __repr__(self) -> str:
        heads = f" x {self.heads}" * (self.heads > 1)
        return f"ProcessGrid({self.rows} x {self.cols}{heads})"
