"""A result in a few numbers, for tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from a2d_mpi.experiments.results import Result

PARTS = ("compute", "merge", "wait", "other")


@dataclass(frozen=True)
class Summary:
    """One result, of one or both phases.

    Attributes
    ----------
    name, workload, method, shape : str
        `shape`: rows x cols x heads @ order / block.
    family : str
        The method, and whether ranks share the heads too.
    ranks : int
    seconds : float
        Of the slowest rank in the median trial, phase by phase.
    parts : dict of str to float
        Where that rank spent them; `PARTS`.
    received, formula : int
        Bytes that the busiest rank received in a call, counted and predicted.
    bound : float
        Bytes that a rank cannot do without, without a head axis; NaN if it is not known.
    predicted : float
        Seconds of the slowest rank by the model; NaN without a profile.
    picked, overlap, passed : bool
    """

    name: str
    workload: str
    method: str
    shape: str
    family: str
    ranks: int
    seconds: float
    parts: dict[str, float]
    received: int
    formula: int
    bound: float
    predicted: float
    picked: bool
    overlap: bool
    passed: bool

    @property
    def plan(self) -> str:
        """Method, shape, and whether it communicates and computes in turn."""
        return f"{self.method} {self.shape}" + " in turn" * (not self.overlap)


def phases_of(result: Result) -> tuple[str, ...]:
    """The phases that were timed."""
    return ("forward", "backward") if result.config["backward"] else ("forward",)


def usual_trial(total: np.ndarray) -> int:
    """The trial, of seconds (trial, rank), whose slowest rank took the (lower) median time."""
    slowest = total.max(axis=1)
    return int(np.argsort(slowest, kind="stable")[(len(slowest) - 1) // 2])


def summarise(result: Result, phases: Sequence[str] | None = None) -> Summary:
    """The numbers of some phases together; default: of all that were timed."""
    c, phases = result.config, phases or phases_of(result)
    seconds, parts = 0.0, dict.fromkeys(PARTS, 0.0)
    for phase in phases:
        total = result.timings[f"{phase}/total"]
        trial = usual_trial(total)
        rank = int(total[trial].argmax())
        known = {x: result.timings[f"{phase}/{x}"][trial, rank] for x in PARTS[:-1]}
        known["other"] = max(0.0, total[trial, rank] - sum(known.values()))
        parts = {x: parts[x] + float(known[x]) for x in PARTS}
        seconds += float(total[trial, rank])
    moved = [x for key, x in result.traffic.items() if key.split("/")[0] in phases]
    received, formula = (
        int(sum((x[kind] for x in moved), np.zeros(1, np.int64)).max())
        for kind in ("received", "predicted_received")
    )
    nothing = np.full(1, np.nan)
    return Summary(
        str(c["name"]),
        str(c["workload"]),
        str(c["method"]),
        f"{c['rows']}x{c['cols']}x{c['heads']}@{c['order']}" + _block(c),
        str(c["method"]) + " + heads" * (int(c["heads"]) > 1),
        int(c["ranks"]),
        seconds,
        parts,
        received,
        formula,
        sum(float(result.figures.get(f"{phase} lower bound", np.nan)) for phase in phases),
        sum(float(result.predicted.get(f"{x}/total", nothing).max()) for x in phases),
        bool(c["picked"]),
        bool(c["overlap"]),
        result.passed,
    )


def _block(config: Mapping[str, object]) -> str:
    """As `a2d_mpi.core.sizes.Layout.numbering` has it; older files know no blocks."""
    block = config.get("block", "1x1")
    return f"/{block}" * (block != "1x1")


def best_of_families(
    summaries: Iterable[Summary], key: Callable[[Summary], float]
) -> dict[str, list[Summary]]:
    """By family: the one of least `key` at every number of ranks, in their order."""
    best: dict[tuple[str, int], Summary] = {}
    for x in summaries:
        best[x.family, x.ranks] = min(best.get((x.family, x.ranks), x), x, key=key)
    found: dict[str, list[Summary]] = {}
    for (family, _), x in sorted(best.items(), key=lambda item: item[0]):
        found.setdefault(family, []).append(x)
    return found
