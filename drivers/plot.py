"""Draw figures and print tables: results of other drivers, grids of ranks, masks and schedules."""

from a2d_mpi.__main__ import start

start("plot")
