"""Figures of drivers/simulate.py: how plans scale, by a simulator; no MPI import."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from a2d_mpi.experiments.simulate import read_summaries
from a2d_mpi.experiments.summary import Summary, in_order
from a2d_mpi.figures.pictures import (
    WIDTH,
    finish,
    log_ranks,
    plain_ticks,
    style,
)

Best = dict[str, dict[tuple[int, int], Summary]]
Lines = Mapping[str, list[Summary]]  # by family, in the order of the ranks
Points = Mapping[str, Mapping[str, Mapping[int, float]]]  # by panel, family and ranks
Choice = Callable[[int, int], bool]  # of ranks and tokens
WORKLOAD = ("mask", "nheads", "nheads_kv", "headdim", "dtype", "backward")


@dataclass
class Scale:
    """The simulations of one workload, its length left open.

    Attributes
    ----------
    entries : list of Summary
    seqlen : int
        Of the figures that have one length.
    """

    entries: list[Summary]
    seqlen: int

    def best(self) -> dict[str, Best]:
        """By machine and network, then family, then (ranks, tokens): the fastest."""
        found: dict[str, Best] = {}
        for x in self.entries:
            # Without the number of nodes: an axis has the ranks.
            machine = re.sub(r"^\d+ nodes", "nodes", str(x.config["machine"]))
            panel = found.setdefault(f"{machine}, {x.config['network']}", {})
            of_family, place = panel.setdefault(x.family, {}), (x.ranks, _seqlen(x))
            of_family[place] = min(of_family.get(place, x), x, key=lambda y: y.seconds)
        return {y: {name: x[name] for name in in_order(x)} for y, x in found.items()}

    def lines(self, chosen: Choice | None = None) -> dict[str, Lines]:
        """By machine and network: the fastest of each family by ranks, of one length for each.

        `chosen` tells if a length is the one; default: `seqlen`.
        """
        chosen = chosen or (lambda ranks, seqlen: seqlen == self.seqlen)
        found: dict[str, dict[str, list[Summary]]] = {}
        for panel, best in self.best().items():
            for name, of_family in best.items():
                if xs := [of_family[x] for x in sorted(of_family) if chosen(*x)]:
                    found.setdefault(panel, {})[name] = xs
        return found

    @property
    def title(self) -> str:
        """The workload in words."""
        c = self.entries[0].config
        phases = "fwd + bwd" if c["backward"] else "fwd"
        heads = f"{c['nheads']} heads/{c['nheads_kv']} x {c['headdim']}"
        return f"simulated: {c['mask']}, {heads}, {c['dtype']}, {phases}"


def read_scale(path: str | Path, workload: str | None = None) -> Scale:
    """The simulations in a file of a workload of that name, and of other lengths of it.

    Default: the workload of the most numbers of ranks, then of the most entries.  What runs on
    slow ranks or ports is left out.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has no such simulation.
    """
    whole = [
        x for x in read_summaries(path) if x.config["slow_rank"] == x.config["slow_port"] == 1
    ]
    if not whole:
        raise ValueError(f"{path} has no simulation to plot")
    named = [x for x in whole if (workload or "") in x.name]
    if not named:
        raise ValueError(f"no workload {workload!r} in {path}")
    entries = Counter(map(_workload, named))
    ranks = Counter(x for x, _ in {(_workload(x), x.ranks) for x in named})
    usual = max(entries, key=lambda x: (ranks[x], entries[x], x))
    return Scale([x for x in whole if _workload(x)[:-1] == usual[:-1]], usual[-1])


def _workload(x: Summary) -> tuple:
    return (*(x.config[y] for y in WORKLOAD), _seqlen(x))


def _seqlen(x: Summary) -> int:
    return int(x.config["seqlen"])


def draw_strong(plt, scale: Scale):
    """Per cent of ideal scaling, from the fastest on the fewest ranks."""
    figure = draw_by_ranks(plt, efficiency(scale.lines()), "% of ideal")
    return finish(figure, _title(scale, scale.seqlen))


def draw_weak(plt, scale: Scale):
    """The same with as many tokens a rank: the work of each grows with the ranks."""
    places = {(x.ranks, _seqlen(x)) for x in scale.entries}
    each = Counter(n // ranks for ranks, n in places if n % ranks == 0)
    usual = max(each, key=lambda x: (each[x], -x))
    lines = scale.lines(lambda ranks, n: n == usual * ranks)
    figure = draw_by_ranks(plt, efficiency(lines, 1), "% of ideal")
    return finish(figure, _title(scale, usual) + " a rank")


def draw_slopes(plt, scale: Scale):
    """Time by number of ranks, and at the end of each line the power of the ranks as fitted."""
    times = _points(scale, lambda x: 1e3 * x.seconds)
    figure = draw_by_ranks(plt, times, "time, ms", log=True)
    for axes, lines in zip(figure.axes, times.values()):
        for known in lines.values():
            if len(known) > 1:
                axes.annotate(f"  P^{power(known):.2f}", max(known.items()), va="bottom")
        axes.set_xlim(right=4 * axes.get_xlim()[1])
    return finish(figure, _title(scale, scale.seqlen))


def draw_exposed(plt, scale: Scale):
    """Share of the time that ranks wait for messages, in the mean."""
    shares = _points(scale, lambda x: 100 * x.parts["wait"] / x.seconds)
    return finish(draw_by_ranks(plt, shares, "exposed, %"), _title(scale, scale.seqlen))


def draw_winners(plt, scale: Scale):
    """The fastest family by ranks and tokens, and how much longer the other sort takes.

    Grids of all kinds are one sort, rings the other.
    """
    panels = scale.best()
    lengths = sorted({_seqlen(x) for x in scale.entries})
    everyone = sorted({x.ranks for x in scale.entries})
    figure, (row,) = plt.subplots(
        1, len(panels), squeeze=False, sharey=True,
        figsize=(WIDTH, 1 + 0.3 * len(everyone)),
    )  # fmt: skip
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
                axes.annotate(f"{lead:.1f} %", (x, y - 0.25), ha="center", va="center", fontsize=6)
        axes.set_xticks(range(len(lengths)), [in_short(x) for x in lengths])
        axes.set_yticks(range(len(everyone)), [str(x) for x in everyone])
        axes.set(xlim=(-0.5, len(lengths) - 0.5), title=name, xlabel="tokens")
    row[0].set_ylabel("ranks")
    return finish(figure, scale.title)


AT_SCALE = {
    "strong": draw_strong,
    "weak": draw_weak,
    "slopes": draw_slopes,
    "exposed": draw_exposed,
    "winners": draw_winners,
}


def efficiency(panels: Mapping[str, Lines], exponent: int = -1) -> Points:
    """Per cent of ideal scaling from the fastest plan on the fewest ranks.

    Ideal times are as the ranks to a power.
    """
    from matplotlib.ticker import EngFormatter

    found = {}
    for title, lines in panels.items():
        first = min((x for xs in lines.values() for x in xs), key=lambda x: (x.ranks, x.seconds))
        seconds = EngFormatter("s", 2)(first.seconds)
        name = f"{title}\n100 %: {seconds} on {first.ranks} ranks".strip()
        found[name] = {
            family: {
                x.ranks: 100 * first.seconds * (x.ranks / first.ranks) ** exponent / x.seconds
                for x in xs
            }
            for family, xs in lines.items()
        }
    return found


def draw_by_ranks(plt, panels: Points, what: str, log: bool = False):
    """A column for each panel; methods alone are above, methods with a head axis below."""
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
            log_ranks(axes, {ranks for values in lines.values() for ranks in values})
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


def _points(scale: Scale, value: Callable[[Summary], float]) -> Points:
    return {
        title: {family: {x.ranks: value(x) for x in xs} for family, xs in lines.items()}
        for title, lines in scale.lines().items()
    }


def _title(scale: Scale, tokens: int) -> str:
    return f"{scale.title}, {in_short(tokens)} tokens"


def power(times: Mapping[int, float]) -> float:
    """Exponent b of the power law ``a ranks**b`` that fits times best (least squares of logs)."""
    return float(np.polyfit(np.log([*times]), np.log([*times.values()]), 1)[0])


def in_short(tokens: int) -> str:
    """64K, 1M, ..."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens}"
