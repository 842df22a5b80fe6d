"""Exact two-dimensional parallel attention over MPI.

Import this package before NumPy: products of matrices are then faster on AMD's Zen 4 and 5
(`a2d_mpi.core.openblas`).  Names are imported when they are first used.  So `core`, `masks`,
`planning` and other packages that need no MPI also work on machines without MPI.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from a2d_mpi.core.openblas import name_core_type

name_core_type()  # OpenBLAS reads the type of the CPU when NumPy is imported

_HOMES = {
    "Attention2D": "a2d_mpi.attention.methods",
    "BlockCausal": "a2d_mpi.masks.windows",
    "BlockCausalDocuments": "a2d_mpi.masks.documents",
    "Causal": "a2d_mpi.masks.mask",
    "CausalBlockwise": "a2d_mpi.masks.documents",
    "check_mask": "a2d_mpi.masks.check",
    "Distribution": "a2d_mpi.sharding.distribution",
    "Documents": "a2d_mpi.masks.documents",
    "DoubleRingAttention": "a2d_mpi.attention.methods",
    "Full": "a2d_mpi.masks.mask",
    "GlobalSlidingWindow": "a2d_mpi.masks.windows",
    "Intersection": "a2d_mpi.masks.mask",
    "IntervalMask": "a2d_mpi.masks.mask",
    "LinearAttention": "a2d_mpi.linear.plan",
    "make_mask": "a2d_mpi.masks.patterns",
    "Mask": "a2d_mpi.masks.mask",
    "merge": "a2d_mpi.devices.merging",
    "NodeAwareAttention": "a2d_mpi.attention.methods",
    "PrefixLM": "a2d_mpi.masks.windows",
    "PrefixLMDocuments": "a2d_mpi.masks.documents",
    "ProcessGrid": "a2d_mpi.comm.grid",
    "RanksLost": "a2d_mpi.comm.failures",
    "register_kernel": "a2d_mpi.kernels",
    "register_mask": "a2d_mpi.masks.patterns",
    "register_method": "a2d_mpi.schedules",
    "RingAttention": "a2d_mpi.attention.methods",
    "SharedQuestion": "a2d_mpi.masks.documents",
    "SlidingWindow": "a2d_mpi.masks.windows",
    "TriangleAttention": "a2d_mpi.attention.methods",
}

__all__ = list(_HOMES)

try:
    __version__ = version("a2d_mpi")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'a2d_mpi' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
