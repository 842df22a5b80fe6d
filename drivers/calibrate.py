"""Measure the machine that this runs on, and write its profile for the planner."""

from a2d_mpi.__main__ import start

start("calibrate")
