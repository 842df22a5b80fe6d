"""A grid of one row of the ranks of another grid."""

from __future__ import annotations

from copy import copy

from mpi4py import MPI

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.layout import Layout


def in_one_row(whole: ProcessGrid) -> ProcessGrid:
    """Return a grid of one row of the same ranks, in the order of grid ranks.  Local.

    It has the communicators of the grid, which frees them, and the same `failures`: a loss in a
    call of one of the two ends all waits in calls of the other.  Their plans are counted together.
    """
    grid, ranks, rank = copy(whole), whole.comm.size, whole.comm.rank
    grid.layout = Layout(1, ranks, nodes=whole.layout.nodes)
    grid.rows, grid.cols, grid.heads = 1, ranks, 1
    grid.row, grid.col, grid.head = 0, rank, 0
    grid.group_comm = grid.row_comm = whole.comm
    grid.col_comm = grid.head_comm = MPI.COMM_SELF
    grid._channel_comms = {tuple(range(ranks)): whole.comm, (rank,): MPI.COMM_SELF}
    return grid
