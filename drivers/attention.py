"""Distributed attention, on random tensors or those of a file: checked, then timed."""

from a2d_mpi.__main__ import start

start("attention")
