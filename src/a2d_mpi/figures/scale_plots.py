"""Figures of the files of drivers/plan.py simulate, which say how plans scale; no MPI import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from a2d_mpi.experiments.plan import read_summaries
from a2d_mpi.experiments.results import Summary, in_order
from a2d_mpi.figures.pictures import (
    WIDTH,
    finish,
    in_short,
    nodes_of,
    plain_ticks,
    style,
    workload_title,
)

Best = dict[str, dict[tuple[int, int], Summary]]
Points = Mapping[str, Mapping[str, Mapping[int, float]]]  # by panel, family and ranks
WORKLOAD = ("mask", "nheads", "nheads_kv", "headdim", "dtype", "backward")


@dataclass
class Scale:
    """The simulations of one workload with sequences of any length.

    Attributes
    ----------
    entries : list of Summary
    seqlen : int
        The length of the figures that show one length.
    """

    entries: list[Summary]
    seqlen: int

    def best(self) -> dict[str, Best]:
        """Find the fastest plan by machine and network, family, and (ranks, tokens)."""
        panels: dict[str, Best] = {}
        for x in self.entries:
            # An axis has the number of ranks, so the name has no number of nodes.
            machine = nodes_of(str(x.config["machine"]))
            panel = panels.setdefault(f"{machine}, {x.config['network']}", {})
            of_family, place = panel.setdefault(x.family, {}), (x.ranks, _seqlen(x))
            of_family[place] = min(of_family.get(place, x), x, key=lambda y: y.seconds)
        return {y: {name: x[name] for name in in_order(x)} for y, x in panels.items()}

    @property
    def title(self) -> str:
        """Describe the workload."""
        return f"simulated: {workload_title(self.entries[0].config)}"


def read_scale(path: str | Path, workload: str | None = None) -> Scale:
    """Read the simulations of a workload, with sequences of any length, from a file.

    `workload` is a part of the name.  Default: the workload with the most numbers of ranks, then
    with the most entries.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has no simulation of this workload.
    """
    if not (usable := read_summaries(path)):
        raise ValueError(f"{path} has no simulation to plot")
    named = [x for x in usable if (workload or "") in x.name]
    if not named:
        raise ValueError(f"no workload {workload!r} in {path}")
    entries = Counter(map(_workload, named))
    ranks = Counter(x for x, _ in {(_workload(x), x.ranks) for x in named})
    usual = max(entries, key=lambda x: (ranks[x], entries[x], x))
    return Scale([x for x in usable if _workload(x)[:-1] == usual[:-1]], usual[-1])


def _workload(x: Summary) -> tuple:
    return (*(x.config[y] for y in WORKLOAD), _seqlen(x))


def _seqlen(x: Summary) -> int:
    return int(x.config["seqlen"])


def draw_slopes(plt, scale: Scale):
    """Draw time by number of ranks, and at the end of each line the fitted power of the ranks."""
    times: dict[str, dict[str, dict[int, float]]] = {}
    for panel, best in scale.best().items():
        for name, of_family in best.items():
            of_length = {x.ranks: x for x in of_family.values() if _seqlen(x) == scale.seqlen}
            if of_length:
                ms = {ranks: 1e3 * of_length[ranks].seconds for ranks in sorted(of_length)}
                times.setdefault(panel, {})[name] = ms
    figure = draw_by_ranks(plt, times, "time, ms", log=True)
    for axes, lines in zip(figure.axes, times.values()):
        for of_family in lines.values():
            if len(of_family) > 1:
                # The exponent b of the power law a P^b, by least squares of logarithms.
                logs = np.log([[*of_family], [*of_family.values()]])
                power = np.polyfit(*logs, 1)[0]
                axes.annotate(f"  P^{power:.2f}", max(of_family.items()), va="bottom")
        axes.set_xlim(right=4 * axes.get_xlim()[1])
    return finish(figure, f"{scale.title}, {in_short(scale.seqlen)} tokens")


def draw_winners(plt, scale: Scale):
    """Draw the fastest family by ranks and tokens, and how much longer the other sort takes.

    Grids of all kinds are one sort, and rings are the other sort.
    """
    panels = scale.best()
    lengths = sorted({_seqlen(x) for x in scale.entries})
    everyone = sorted({x.ranks for x in scale.entries})
    size = WIDTH, 1 + 0.3 * len(everyone)
    figure, (row,) = plt.subplots(1, len(panels), squeeze=False, sharey=True, figsize=size)
    for axes, (name, best) in zip(row, panels.items(), strict=True):
        for place in sorted({x for of_family in best.values() for x in of_family}):
            seconds = {y: x[place].seconds for y, x in best.items() if place in x}
            first = min(seconds, key=seconds.__getitem__)
            others = [x for y, x in seconds.items() if ("ring" in y) != ("ring" in first)]
            lead = 100 * (min(others, default=np.nan) / seconds[first] - 1)
            x, y = lengths.index(place[1]), everyone.index(place[0])
            axes.barh(y, 0.96, 0.94, x - 0.48, color=style(first)["color"], alpha=0.3)
            axes.plot(x, y + 0.15, linestyle="none", label=first, **style(first))
            if others:
                axes.annotate(
                    f"{lead:.{int(lead < 10)}f} %", (x, y - 0.25), ha="center", va="center"
                )
        axes.set_xticks(range(len(lengths)), [in_short(x) for x in lengths])
        axes.set_yticks(range(len(everyone)), [str(x) for x in everyone])
        axes.set(xlim=(-0.5, len(lengths) - 0.5), title=name, xlabel="tokens")
    row[0].set_ylabel("ranks")
    kinds = "number: how much longer the fastest plan of the other kind takes (grid or ring)"
    return finish(figure, f"{scale.title}; {kinds}")


AT_SCALE = {"slopes": draw_slopes, "winners": draw_winners}


def draw_by_ranks(plt, panels: Points, what: str, log: bool = False):
    """Draw a column for each panel.

    Plans whose ranks have all heads are above, and plans whose ranks share the heads are below.
    """
    rows = sorted({" + heads" in x for lines in panels.values() for x in lines})
    figure, grid = plt.subplots(
        len(rows), len(panels), squeeze=False, sharex="col", sharey=True,
        figsize=(min(WIDTH, 1 + 2.2 * len(panels)), 1 + 1.4 * len(rows)),
    )  # fmt: skip
    for heads, row in zip(rows, grid):
        for axes, (title, lines) in zip(row, panels.items(), strict=True):
            for family, values in lines.items():
                if (" + heads" in family) == heads:
                    axes.plot(*zip(*sorted(values.items())), label=family.partition(" + ")[0],
                              **style(family))  # fmt: skip
            ranks = sorted({x for values in lines.values() for x in values})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ranks, [str(x) for x in ranks])
            axes.minorticks_off()
            axes.set_xlim(ranks[0] / 1.25, ranks[-1] * 1.25)
            axes.set_title(title if heads == rows[0] else "")
            axes.set_xlabel("ranks" if heads == rows[-1] else "")
            axes.grid(axis="y", linewidth=0.3)
        row[0].set_ylabel(f"{what}\n(ranks share the heads)" if heads else what)
    if log:
        grid[0, 0].set_yscale("log")
        plain_ticks(grid[0, 0].yaxis)
    else:
        grid[0, 0].set_ylim(bottom=0)
    return figure
