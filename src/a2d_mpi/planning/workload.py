"""Workloads: what plans are made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.masks.compiled import CompiledMask, compile_mask
from a2d_mpi.masks.mask import Full, Mask

SIZES = ("seqlen", "nheads", "nheads_kv", "headdim", "headdim_v", "dtype")


@dataclass(frozen=True, kw_only=True)
class Workload(AttentionConfig):
    """A config with a mask and the phases to run: the subject of a plan or a prediction.

    Parameters
    ----------
    mask : Mask
    backward : bool
        Whether gradients are computed, too.
    overlap : bool
        Whether to compute while messages travel.
    mask_text : str
        Text of the mask, as `a2d_mpi.masks.patterns.make_mask` takes it, for names and files.
    **others
        As in `AttentionConfig`.
    """

    dtype: str = "bfloat16"
    mask: Mask = field(default_factory=Full)
    backward: bool = False
    overlap: bool = True
    mask_text: str = ""

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases that are run."""
        return PHASES if self.backward else PHASES[:1]

    @cached_property
    def seen(self) -> CompiledMask:
        """The compiled mask, which the problems of all candidates share."""
        return compile_mask(self.mask, self.seqlen, self.seqlen_kv)

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes in files."""
        names = *SIZES, "backward", "overlap"
        given = {x: getattr(self, x) for x in names}
        return {**given, "mask": self.mask_text, "wire": self.wire or "none"}


# The layers of a model: the number of layers of each kind, and the workload of one.
Layers = Sequence[tuple[int, Workload]]
