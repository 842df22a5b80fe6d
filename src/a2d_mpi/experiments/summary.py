"""A result in a few numbers, for tables and plots; no MPI import."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.results import Result, phases_of, usual_trial
from a2d_mpi.experiments.tables import aligned
from a2d_mpi.schedules import METHODS

PARTS = ("compute", "merge", "wait", "other")
TABLE = ("  plan", "phase", "ms", "ratio", "wait", "predicted", "received", "checks")
# Methods alone and with a head axis, in the order of tables and figures.
FAMILIES = tuple(
    method + heads for method in (*METHODS, "all-gather") for heads in ("", " + heads")
)


@dataclass(frozen=True)
class Summary:
    """One result, measured or simulated, of one or both phases.

    Attributes
    ----------
    name : str
    config : mapping
        Of the result: method, workload, sizes, options.
    phase : str
        "forward", "backward" or "both".
    seconds : float
        Of the slowest rank in the median trial, phase by phase.
    parts : dict of str to float
        Where that rank spent them, by `PARTS`.  Simulated: "wait" alone, in the mean of all ranks.
    received, formula : int
        Bytes that the busiest rank received in a call, counted and predicted; 0: not known.
    bound : float
        Bytes that a rank cannot do without, without a head axis; NaN if it is not known.
    predicted : float
        Seconds of the slowest rank by the model; NaN without a profile.
    passed : bool
    """

    name: str
    config: Mapping[str, object]
    phase: str
    seconds: float
    parts: dict[str, float]
    received: int = 0
    formula: int = 0
    bound: float = math.nan
    predicted: float = math.nan
    passed: bool = True

    @property
    def workload(self) -> str:
        """Its name."""
        return str(self.config["workload"])

    @property
    def method(self) -> str:
        """Its name; see `a2d_mpi.schedules.METHODS`."""
        return str(self.config["method"])

    @property
    def ranks(self) -> int:
        """Their number."""
        return int(self.config["ranks"])

    @property
    def picked(self) -> bool:
        """Whether the planner chose it."""
        return bool(self.config["picked"])

    @property
    def overlap(self) -> bool:
        """Whether it computes while messages travel."""
        return bool(self.config["overlap"])

    @property
    def family(self) -> str:
        """The method, or the name that others have for it; whether ranks share the heads."""
        layout = Layout(*(int(self.config[x]) for x in ("rows", "cols", "heads")))
        method = METHODS.get(self.method)  # None: of a user, who has not imported it here
        known_as = method.known_as(layout) if method else ""
        name = known_as if known_as in FAMILIES else self.method
        return name + " + heads" * (layout.heads > 1)

    @property
    def shape(self) -> str:
        """Rows x cols x heads @ order / block."""
        c, block = self.config, self.config.get("block", "1x1")  # older files know no blocks
        shape = f"{c['rows']}x{c['cols']}x{c['heads']}@{c['order']}"
        return shape + f"/{block}" * (block != "1x1")

    @property
    def plan(self) -> str:
        """Method, shape, and whether it communicates and computes in turn."""
        return f"{self.method} {self.shape}" + " in turn" * (not self.overlap)


def summarise(result: Result, phases: Sequence[str] | None = None) -> Summary:
    """The numbers of some phases together; default: of all that were timed."""
    phases = phases or phases_of(result)
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
        str(result.config["name"]),
        result.config,
        "both" if len(phases) > 1 else phases[0],
        seconds,
        parts,
        received,
        formula,
        sum(float(result.figures.get(f"{phase} lower bound", np.nan)) for phase in phases),
        sum(float(result.predicted.get(f"{x}/total", nothing).max()) for x in phases),
        result.passed,
    )


def table(summaries: Sequence[Summary]) -> str:
    """One line for each summary of one workload on one number of ranks.

    "ratio": of the seconds to those of the planner's pick, if it is there, else of the fastest.
    """
    first, rows = summaries[0], [TABLE]
    for x in summaries:
        rivals = [y for y in summaries if y.phase == x.phase]
        best = min(rivals, key=lambda y: (not y.picked, y.seconds))
        rows.append((
            f"  {x.plan}",
            x.phase,
            f"{1e3 * x.seconds:.2f}",
            f"{x.seconds / best.seconds:.2f}",
            f"{1e3 * x.parts['wait']:.2f}",
            "" if math.isnan(x.predicted) else f"{1e3 * x.predicted:.2f}",
            f"{x.received or ''}",
            ("passed" if x.passed else "FAILED") + "  (picked)" * x.picked,
        ))  # fmt: skip
    title = f"{first.workload}, {first.ranks} ranks"
    return f"{title}\n{aligned(rows, left=(0, 1, len(TABLE) - 1))}"


def in_order(families: Iterable[str]) -> list[str]:
    """Families, each once, as in `FAMILIES`; then methods of a user, which are not in there."""
    given = set(families)
    return [x for x in FAMILIES if x in given] + sorted(given.difference(FAMILIES))


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
