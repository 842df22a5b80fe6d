"""Workloads, and plans for them: what the planner plans, benchmarks time and files describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.layout import Layout
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


@dataclass(frozen=True)
class Choice:
    """A plan for a workload.

    Attributes
    ----------
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    layout : Layout
    work : Workload
    picked : bool
        Whether the planner chose it for the workload.
    """

    method: str
    layout: Layout
    work: Workload
    picked: bool = False

    @property
    def name(self) -> str:
        """Name in files, different for each plan; the shape in it says the number of ranks."""
        order = self.layout.numbering.replace("/", "_")  # a slash would make a subgroup
        order += f"-{self.layout.distribution}" if self.layout.distribution else ""
        order += f"_slices{self.layout.sliced}" if self.layout.slices else ""
        plan = f"{self.method.replace(' ', '_')}-{self.layout.shape}-{order}"
        overlap = "overlap" if self.work.overlap else "in_turn"
        return f"{plan}-{workload_name(self.work.attributes)}-{overlap}"

    @property
    def attributes(self) -> dict[str, object]:
        """Attributes of the plan and its workload in files."""
        own = {"method": self.method, "slices": self.layout.sliced, "picked": self.picked}
        return {**self.work.attributes, **self.layout.attributes, **own}


def workload_name(config: Mapping[str, object]) -> str:
    """Return the name of a workload from its attributes; overlap is not in it."""
    c = {"headdim_v": config["headdim"], "wire": "none", **config}
    values = f"x{c['headdim_v']}" * (c["headdim_v"] != c["headdim"])
    heads = f"h{c['nheads']}-kv{c['nheads_kv']}-d{c['headdim']}{values}"
    wire = f"-{c['wire']}" * (c["wire"] != "none")
    passes = "backward" if c["backward"] else "forward"
    return f"{c['mask']}-n{c['seqlen']}-{heads}-{c['dtype']}{wire}-{passes}"
