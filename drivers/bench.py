"""Benchmarks: attention, kernels, linear attention; training and decoding of a model."""

from a2d_mpi.__main__ import start

start("bench")
