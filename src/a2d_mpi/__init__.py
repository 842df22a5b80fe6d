"""Exact two-dimensional parallel attention over MPI."""

from importlib.metadata import PackageNotFoundError, version

from a2d_mpi.attention2d import Attention2D
from a2d_mpi.baselines.ring import RingAttention
from a2d_mpi.distribution import Distribution
from a2d_mpi.grid import ProcessGrid
from a2d_mpi.masks import Causal, Full, IntervalMask, Mask

__all__ = [
    "Attention2D",
    "Causal",
    "Distribution",
    "Full",
    "IntervalMask",
    "Mask",
    "ProcessGrid",
    "RingAttention",
]

try:
    __version__ = version("a2d_mpi")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
