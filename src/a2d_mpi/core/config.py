"""What is to be computed, on however many ranks: one frozen description."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.dtypes import as_dtype, compute_dtype
from a2d_mpi.core.masks import Full, Mask
from a2d_mpi.core.sizes import LARGEST, Layout, Problem, check_sizes

PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Workload:
    """What is to be computed: the arguments of an `AttentionPlan`, by the same names.

    `backward`: also the gradients.
    """

    seqlen: int
    nheads: int
    headdim: int
    nheads_kv: int | None = None
    mask: Mask = field(default_factory=Full)
    dtype: str = "bfloat16"
    backward: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.nheads_kv is None:
            object.__setattr__(self, "nheads_kv", self.nheads)
        check_sizes(**{name: getattr(self, name) for name in LARGEST})
        as_dtype(self.dtype)

    @property
    def phases(self) -> tuple[str, ...]:
        """What is timed."""
        return PHASES if self.backward else PHASES[:1]

    def problem(self, layout: Layout, distribution: str) -> Problem:
        """Sizes for `a2d_mpi.planning.cost`."""
        whole = Distribution(distribution, self.seqlen, layout.size, layout.heads)
        sizes = (self.nheads, self.nheads_kv, self.headdim)
        dtype = as_dtype(self.dtype)
        return Problem(_counts(whole), *sizes, dtype.itemsize, compute_dtype(dtype).itemsize)


@lru_cache(maxsize=64)
def _counts(whole: Distribution) -> tuple[int, ...]:
    return whole.counts
