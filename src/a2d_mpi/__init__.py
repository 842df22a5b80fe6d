"""Exact two-dimensional parallel attention over MPI.

Import this package before NumPy: products of matrices are then faster on AMD's Zen 4 and 5
(`a2d_mpi.core.openblas`).  Names are imported when they are first used.  So `core`, `masks`,
`planning` and other packages that need no MPI also work on machines without MPI.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from a2d_mpi.core.openblas import name_core_type

name_core_type()  # OpenBLAS reads the type of the CPU when NumPy is imported

# The public names by module.  Type checkers and editors read `__init__.pyi`.
_PUBLIC = {
    "a2d_mpi.attention.methods": [
        "Attention2D",
        "DoubleRingAttention",
        "NodeAwareAttention",
        "RingAttention",
        "TriangleAttention",
    ],
    "a2d_mpi.attention.registering": ["register_kernel", "register_mask", "register_method"],
    "a2d_mpi.comm.grid": ["ProcessGrid"],
    "a2d_mpi.comm.survival": ["RanksLost"],
    "a2d_mpi.devices.merging": ["merge"],
    "a2d_mpi.checks.autotune": ["autotune"],
    "a2d_mpi.linear.linear_attention": ["LinearAttention"],
    "a2d_mpi.masks.arrays": ["IntervalMask"],
    "a2d_mpi.masks.validity": ["check_mask"],
    "a2d_mpi.masks.documents": [
        "CausalBlockwise",
        "Documents",
        "PrefixLMDocuments",
        "SharedQuestion",
    ],
    "a2d_mpi.masks.mask": ["Causal", "Full", "Intersection", "Mask"],
    "a2d_mpi.masks.patterns": ["make_mask"],
    "a2d_mpi.masks.windows": ["BlockCausal", "GlobalSlidingWindow", "PrefixLM", "SlidingWindow"],
    "a2d_mpi.sharding.distribution": ["Distribution"],
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_HOMES)

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
