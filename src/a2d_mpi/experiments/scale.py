"""Entries of drivers/simulate.py by workload and family of plans; no MPI import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.pictures import STYLES, add_styles
from a2d_mpi.experiments.simulate import read_simulations, seconds
from a2d_mpi.schedules import METHODS

Entry = Mapping[str, object]
Best = dict[str, dict[tuple[int, int], Entry]]
WORKLOAD = ("mask", "nheads", "nheads_kv", "headdim", "dtype", "backward")


@dataclass
class Scale:
    """The simulations of one workload, its length left open.

    Attributes
    ----------
    entries : list of Entry
    seqlen : int
        Of the figures that have one length.
    """

    entries: list[Entry]
    seqlen: int

    def best(self) -> dict[str, Best]:
        """By machine and network, then family, then (ranks, tokens): the fastest that fits."""
        found: dict[str, Best] = {}
        for x in filter(fits, self.entries):
            panel = found.setdefault(f"{x['machine']}, {x['network']}", {y: {} for y in STYLES})
            of_family = panel[family(x)]
            place = int(x["ranks"]), int(x["seqlen"])
            of_family[place] = min(of_family.get(place, x), x, key=total)
        return {y: {name: x for name, x in panel.items() if x} for y, panel in found.items()}

    @property
    def title(self) -> str:
        """The workload in words."""
        c = self.entries[0]
        phases = "fwd + bwd" if c["backward"] else "fwd"
        heads = f"{c['nheads']} heads/{c['nheads_kv']} x {c['headdim']}"
        return f"simulated: {c['mask']}, {heads},\n{c['dtype']}, {phases}"


def read_scale(path: str | Path, workload: str | None = None) -> Scale:
    """The simulations in a file of a workload of that name, and of other lengths of it.

    Default: the workload of the most numbers of ranks, then of the most entries.  What runs on
    slow ranks or ports is left out.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has no such simulation.
    """
    whole = {
        name: x
        for name, x in read_simulations(path).items()
        if np.isfinite(total(x)) and x["slow_rank"] == x["slow_port"] == 1
    }
    if not whole:
        raise ValueError(f"{path} has no simulation to plot")
    add_styles(map(family, whole.values()))
    named = {name: x for name, x in whole.items() if (workload or "") in name}
    if not named:
        raise ValueError(f"no workload {workload!r} in {path}")
    entries = Counter(map(_workload, named.values()))
    ranks = Counter(x for x, _ in {(_workload(x), x["ranks"]) for x in named.values()})
    usual = max(entries, key=lambda x: (ranks[x], entries[x], x))
    return Scale([x for x in whole.values() if _workload(x)[:-1] == usual[:-1]], usual[-1])


def family(x: Entry) -> str:
    """Name of a plan in figures and tables: its method, or the one under which others know it."""
    layout = Layout(*(int(x[y]) for y in ("rows", "cols", "heads")))
    method = METHODS.get(f"{x['method']}")  # None: of a user, who has not imported it here
    known_as = method.known_as(layout) if method else ""
    name = known_as if known_as in STYLES else f"{x['method']}"
    return name + " + heads" * (layout.heads > 1)


def fits(x: Entry) -> bool:
    """Tell if the ranks have the memory."""
    return bool(x["memory"] <= x["room"])


def total(x: Entry) -> float:
    """Simulated seconds of the slowest rank, phase by phase."""
    return seconds(x, "simulated")


def power(times: Mapping[int, float]) -> float:
    """Exponent b of the power law ``a ranks**b`` that fits times best (least squares of logs)."""
    return float(np.polyfit(np.log([*times]), np.log([*times.values()]), 1)[0])


def in_short(tokens: int) -> str:
    """64K, 1M, ..."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens}"


def _workload(x: Entry) -> tuple:
    return (*(x[y] for y in WORKLOAD), int(x["seqlen"]))
