"""The R x C process grid."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm import agree


class ProcessGrid:
    """P = rows x cols ranks, row-major: rank = r * cols + c.

        R = 2, C = 3        col 0     col 1     col 2
                 row 0   [ rank 0 | rank 1 | rank 2 ]  <- row_comm: gather Q, reduce out
                 row 1   [ rank 3 | rank 4 | rank 5 ]
                            ^ col_comm: gather K, V; in the backward pass reduce dK, dV

    Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Of exactly ``rows * cols`` ranks.  It is duplicated: the grid's messages never meet the
        caller's.
    rows, cols : int
        R and C, both at least 1.

    Attributes
    ----------
    comm : Intracomm
        All ranks of the grid.
    row_comm : Intracomm
        The ranks of my row, size C, my rank in it is my column.
    col_comm : Intracomm
        The ranks of my column, size R, my rank in it is my row.
    rows, cols, row, col : int
        R, C and my coordinates.

    Raises
    ------
    ValueError
        On all ranks, if rows x cols is not the size of `comm` or differs between ranks.
    """

    def __init__(self, comm: MPI.Intracomm, rows: int, cols: int) -> None:
        problem = None
        whole = all(isinstance(x, (int, np.integer)) for x in (rows, cols))
        if not whole or rows < 1 or cols < 1 or rows * cols != comm.size:
            problem = f"a {rows} x {cols} grid does not fit {comm.size} ranks"
        agree(comm, problem, {"rows": rows, "cols": cols})
        self.comm = comm.Dup()
        self.rows, self.cols = rows, cols
        self.row, self.col = divmod(comm.rank, cols)
        self.row_comm = self.comm.Split(color=self.row, key=self.col)
        self.col_comm = self.comm.Split(color=self.col, key=self.row)

    def rank_of(self, row: int, col: int) -> int:
        """Rank of the process at (row, col)."""
        return row * self.cols + col

    def free(self) -> None:
        """Free the communicators.  Collective; the grid cannot be used afterwards."""
        for comm in (self.row_comm, self.col_comm, self.comm):
            comm.Free()

    def __repr__(self) -> str:
        return f"ProcessGrid({self.rows} x {self.cols})"
