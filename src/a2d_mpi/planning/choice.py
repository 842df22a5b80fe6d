"""Plans for workloads: what the planner chooses, benchmarks time and files describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from a2d_mpi.core.layout import Layout
from a2d_mpi.planning.workload import Workload


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
