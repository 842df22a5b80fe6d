"""Plans for a machine: the fastest methods and grids, by the model or by a network simulator."""

from a2d_mpi.__main__ import start

start("plan")
