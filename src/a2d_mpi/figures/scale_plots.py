"""Figures of drivers/simulate.py: how plans scale, by a simulator; no MPI import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from a2d_mpi.experiments.simulate import read_summaries
from a2d_mpi.experiments.summary import Summary, in_order
from a2d_mpi.figures.pictures import STYLES, log_ranks, plain_ticks

Best = dict[str, dict[tuple[int, int], Summary]]
Lines = Mapping[str, list[Summary]]  # by family, in the order of the ranks
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
            panel = found.setdefault(f"{x.config['machine']}, {x.config['network']}", {})
            of_family, place = panel.setdefault(x.family, {}), (x.ranks, _seqlen(x))
            of_family[place] = min(of_family.get(place, x), x, key=lambda y: y.seconds)
        return {y: {name: x[name] for name in in_order(x)} for y, x in found.items()}

    def lines(self, chosen: Choice | None = None) -> dict[str, Lines]:
        """By machine and network: the fastest of each family by ranks, of one length for each.

        `chosen` tells if a length is the one; default: `seqlen`.
        """
        chosen = chosen or (lambda ranks, seqlen: seqlen == self.seqlen)
        panels = {
            panel: {
                name: [of_family[x] for x in sorted(of_family) if chosen(*x)]
                for name, of_family in best.items()
            }
            for panel, best in self.best().items()
        }
        panels = {x: {name: xs for name, xs in y.items() if xs} for x, y in panels.items()}
        return {panel: lines for panel, lines in panels.items() if lines}

    @property
    def title(self) -> str:
        """The workload in words."""
        c = self.entries[0].config
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


def draw_strong(plt, scale: Scale, width: float):
    """Time by number of ranks, with per cent of ideal from the fastest on the fewest."""
    return draw_times(plt, scale.lines(), width), _title(scale, scale.seqlen)


def draw_weak(plt, scale: Scale, width: float):
    """Likewise, as many tokens a rank: the work of each grows with the ranks."""
    places = {(x.ranks, _seqlen(x)) for x in scale.entries}
    each = Counter(n // ranks for ranks, n in places if n % ranks == 0)
    usual = max(each, key=lambda x: (each[x], -x))
    lines = scale.lines(lambda ranks, n: n == usual * ranks)
    return draw_times(plt, lines, width, 1), _title(scale, usual) + " a rank"


def draw_slopes(plt, scale: Scale, width: float):
    """Time by number of ranks, and at the end of each line the power of the ranks as fitted."""

    def draw(axes, lines: Lines) -> None:
        for name, xs in lines.items():
            if len(xs) > 1:
                times = {x.ranks: milliseconds(x) for x in xs}
                axes.annotate(f" P^{power(times):.2f}", max(times.items()), fontsize=5,
                              color=STYLES[name][0])  # fmt: skip
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.set_ylabel("time, ms")

    figure = draw_by_ranks(plt, scale.lines(), width, draw, milliseconds)
    return figure, _title(scale, scale.seqlen)


def draw_exposed(plt, scale: Scale, width: float):
    """Share of the time that ranks wait for messages, in the mean."""

    def draw(axes, _: Lines) -> None:
        axes.set_ylim(0, 100)
        axes.set_ylabel("exposed, %")

    def share(x: Summary) -> float:
        return 100 * x.parts["wait"] / x.seconds

    return draw_by_ranks(plt, scale.lines(), width, draw, share), _title(scale, scale.seqlen)


def draw_winners(plt, scale: Scale, width: float):
    """The fastest family by ranks and tokens, and how much longer the other sort takes.

    Grids of all kinds are one sort, rings the other.
    """
    panels = scale.best()
    lengths = sorted({_seqlen(x) for x in scale.entries})
    heights = [len({ranks for x in best.values() for ranks, _ in x}) for best in panels.values()]
    figure, rows = plt.subplots(
        len(panels), 1, squeeze=False, height_ratios=heights,
        figsize=(width, (0.15 + 0.13 * len(panels) + 0.12 * sum(heights)) * width),
    )  # fmt: skip
    for axes, (name, best) in zip(rows[:, 0], panels.items(), strict=True):
        places = {place for x in best.values() for place in x}
        everyone = sorted({ranks for ranks, _ in places})
        for ranks, seqlen in places:
            of_place = {y: x[ranks, seqlen].seconds for y, x in best.items()
                        if (ranks, seqlen) in x}  # fmt: skip
            first = min(of_place, key=of_place.__getitem__)
            others = [x for y, x in of_place.items() if ("ring" in y) != ("ring" in first)]
            lead = 100 * (min(others, default=np.nan) / of_place[first] - 1)
            at = lengths.index(seqlen), everyone.index(ranks)
            colour = STYLES[first][0]
            same = [y for y, x in STYLES.items() if x[0] == colour]
            axes.barh(at[1], 0.96, 0.94, at[0] - 0.48, color=colour, alpha=0.5, linewidth=0,
                      edgecolor="white", hatch="///" * same.index(first))  # fmt: skip
            text = first.replace(" + ", "\n+ ") + f"\n{lead:.1f} %" * bool(others)
            axes.annotate(text, at, ha="center", va="center", fontsize=5)
        axes.set_xticks(range(len(lengths)), [in_short(x) for x in lengths])
        axes.set_yticks(range(len(everyone)), [str(x) for x in everyone])
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylabel("ranks")
        axes.set_title(name)
    rows[-1, 0].set_xlabel("tokens (%: rings, or grids, take so much longer)")
    return figure, scale.title


AT_SCALE = {
    "strong": draw_strong,
    "weak": draw_weak,
    "slopes": draw_slopes,
    "exposed": draw_exposed,
    "winners": draw_winners,
}


def draw_times(plt, panels: Mapping[str, Lines], width: float, exponent: int = -1):
    """Time by number of ranks; ideal is as the ranks to a power."""

    def draw(axes, lines: Lines) -> None:
        times = {}  # of all families, by ranks
        for x in (x for xs in lines.values() for x in xs):
            times.setdefault(x.ranks, []).append(milliseconds(x))
        fewest = min(times)
        ideal = {n: min(times[fewest]) * (n / fewest) ** exponent for n in sorted(times)}
        axes.plot(*zip(*ideal.items()), color="black", linewidth=0.8, label="ideal")
        for ranks in [*ideal][1:]:
            # The best and the worst: more would not be readable.
            for y, up in ((min(times[ranks]), -8), (max(times[ranks]), 8)):
                axes.annotate(f"{100 * ideal[ranks] / y:.0f} %", (ranks, y), (0, up), fontsize=5,
                              textcoords="offset points", ha="center", va="center")  # fmt: skip
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.margins(y=0.15)
        axes.set_ylabel("time, ms\n(% of ideal)")

    return draw_by_ranks(plt, panels, width, draw, milliseconds)


def draw_by_ranks(plt, panels: Mapping[str, Lines], width: float, draw, value):
    """A panel for each title: a value by number of ranks; `draw` adds what is beside the lines."""
    figure, rows = plt.subplots(
        len(panels), 1, squeeze=False, figsize=(width, (0.3 + 0.5 * len(panels)) * width)
    )
    for axes, (title, lines) in zip(rows[:, 0], panels.items(), strict=True):
        draw(axes, lines)
        for label, xs in lines.items():
            colour, marker, line = STYLES[label]
            axes.plot([x.ranks for x in xs], [value(x) for x in xs], color=colour, marker=marker,
                      linestyle=line, label=label)  # fmt: skip
        log_ranks(axes, sorted({x.ranks for xs in lines.values() for x in xs}))
        axes.set_xlabel("ranks" if axes is rows[-1, 0] else "")
        axes.set_title(title)
    return figure


def _title(scale: Scale, tokens: int) -> str:
    return f"{scale.title}, {in_short(tokens)} tokens"


def milliseconds(x: Summary) -> float:
    """Of the slowest rank."""
    return 1e3 * x.seconds


def power(times: Mapping[int, float]) -> float:
    """Exponent b of the power law ``a ranks**b`` that fits times best (least squares of logs)."""
    return float(np.polyfit(np.log([*times]), np.log([*times.values()]), 1)[0])


def in_short(tokens: int) -> str:
    """64K, 1M, ..."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens}"
