"""The public names, for type checkers and editors; see `__init__.py`."""

from a2d_mpi.attention.methods import (
    Attention2D,
    DoubleRingAttention,
    NodeAwareAttention,
    RingAttention,
    TriangleAttention,
)
from a2d_mpi.attention.registering import register_kernel, register_mask, register_method
from a2d_mpi.checks.autotune import autotune
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.survival import RanksLost
from a2d_mpi.devices.merging import merge
from a2d_mpi.linear.linear_attention import LinearAttention
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.documents import (
    CausalBlockwise,
    Documents,
    PrefixLMDocuments,
    SharedQuestion,
)
from a2d_mpi.masks.mask import Causal, Full, Intersection, Mask
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.masks.validity import check_mask
from a2d_mpi.masks.windows import BlockCausal, GlobalSlidingWindow, PrefixLM, SlidingWindow
from a2d_mpi.sharding.distribution import Distribution

__version__: str
__all__ = [
    "Attention2D",
    "BlockCausal",
    "Causal",
    "CausalBlockwise",
    "Distribution",
    "Documents",
    "DoubleRingAttention",
    "Full",
    "GlobalSlidingWindow",
    "Intersection",
    "IntervalMask",
    "LinearAttention",
    "Mask",
    "NodeAwareAttention",
    "PrefixLM",
    "PrefixLMDocuments",
    "ProcessGrid",
    "RanksLost",
    "RingAttention",
    "SharedQuestion",
    "SlidingWindow",
    "TriangleAttention",
    "autotune",
    "check_mask",
    "make_mask",
    "merge",
    "register_kernel",
    "register_mask",
    "register_method",
]
