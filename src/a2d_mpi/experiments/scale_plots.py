"""Figures of drivers/simulate.py: how plans scale, by a simulator; no MPI import."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from a2d_mpi.experiments.pictures import STYLES, log_ranks, plain_ticks
from a2d_mpi.experiments.simulate import read_simulations, seconds

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

    def best(self, fitting: bool = False) -> dict[str, Best]:
        """By machine and network, then family, then (ranks, tokens): the fastest plan.

        `fitting`: of those for which the ranks have the memory.
        """
        found: dict[str, Best] = {}
        for x in self.entries:
            if fitting and x["memory"] > x["room"]:
                continue
            panel = found.setdefault(f"{x['machine']}, {x['network']}", {y: {} for y in STYLES})
            of_family = panel[f"{x['method']}" + " + heads" * (x["heads"] > 1)]
            place = int(x["ranks"]), int(x["seqlen"])
            of_family[place] = min(of_family.get(place, x), x, key=_total)
        return {y: {name: x for name, x in panel.items() if x} for y, panel in found.items()}

    @property
    def title(self) -> str:
        """The workload in words."""
        c = self.entries[0]
        phases = "fwd + bwd" if c["backward"] else "fwd"
        heads = f"{c['nheads']} heads/{c['nheads_kv']} x {c['headdim']}"
        return f"simulated: {c['mask']}, {heads},\n{c['dtype']}, {phases}"


def read_scale(args: argparse.Namespace) -> Scale:
    """The simulations in a file of the workload called ``--workload``, and of other lengths of it.

    Default: the workload of the most numbers of ranks, then of the most entries.  What runs on
    slow ranks or ports is left out.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has no such simulation.
    """
    whole = {
        name: x
        for name, x in read_simulations(args.results).items()
        if np.isfinite(_total(x)) and x["slow_rank"] == x["slow_port"] == 1
    }
    if not whole:
        raise ValueError(f"{args.results} has no simulation to plot")
    named = {name: x for name, x in whole.items() if (args.workload or "") in name}
    if not named:
        raise ValueError(f"no workload {args.workload!r} in {args.results}")
    entries = Counter(map(_workload, named.values()))
    ranks = Counter(x for x, _ in {(_workload(x), x["ranks"]) for x in named.values()})
    usual = max(entries, key=lambda x: (ranks[x], entries[x], x))
    return Scale([x for x in whole.values() if _workload(x)[:-1] == usual[:-1]], usual[-1])


def draw_strong(plt, scale: Scale, width: float):
    """Time by number of ranks, with per cent of ideal from the fastest on the fewest."""

    def draw(axes, best: Best) -> None:
        places = [place for x in best.values() for place in x]
        fewest = min(ranks for ranks, _ in places)
        least = min(_total(x) for of in best.values() for (n, _), x in of.items() if n == fewest)
        everyone = sorted({ranks for ranks, _ in places})
        ideal = {ranks: 1e3 * least * fewest / ranks for ranks in everyone}
        axes.plot(everyone, list(ideal.values()), color="black", linewidth=0.8, label="ideal")
        for ranks in everyone[1:]:
            of_ranks = [1e3 * _total(x) for of in best.values() for (n, _), x in of.items()
                        if n == ranks]  # fmt: skip
            for y, up in ((min(of_ranks), -8), (max(of_ranks), 8)):
                axes.annotate(f"{100 * ideal[ranks] / y:.0f} %", (ranks, y), (0, up), fontsize=5,
                              textcoords="offset points", ha="center", va="center")  # fmt: skip
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.margins(y=0.15)
        axes.set_ylabel("time, ms\n(% of ideal)")

    return _by_ranks(plt, scale, width, draw, lambda x: 1e3 * _total(x))


def draw_slopes(plt, scale: Scale, width: float):
    """Time by number of ranks, and at the end of each line the power of the ranks as fitted."""

    def draw(axes, best: Best) -> None:
        for family, x in best.items():
            if len(x) > 1:
                ranks, times = zip(*((n, 1e3 * _total(y)) for (n, _), y in sorted(x.items())))
                power = np.polyfit(np.log(ranks), np.log(times), 1)[0]
                axes.annotate(f" P^{power:.2f}", (ranks[-1], times[-1]), fontsize=5,
                              color=STYLES[family][0])  # fmt: skip
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.set_ylabel("time, ms")

    return _by_ranks(plt, scale, width, draw, lambda x: 1e3 * _total(x))


def draw_exposed(plt, scale: Scale, width: float):
    """Share of the time that ranks wait for messages, in the mean."""

    def draw(axes, best: Best) -> None:
        axes.set_ylim(0, 100)
        axes.set_ylabel("exposed, %")

    return _by_ranks(plt, scale, width, draw, lambda x: 100 * _waiting(x) / _total(x))


def draw_winners(plt, scale: Scale, width: float):
    """The fastest family by ranks and tokens, and how much longer the next one takes.

    Of those for which the ranks have the memory.
    """
    panels = scale.best(fitting=True)
    lengths = sorted({int(x["seqlen"]) for x in scale.entries})
    heights = [len({ranks for x in best.values() for ranks, _ in x}) for best in panels.values()]
    figure, rows = plt.subplots(
        *(len(panels), 1), squeeze=False, height_ratios=heights,
        figsize=(width, (0.15 + 0.13 * len(panels) + 0.12 * sum(heights)) * width),
    )  # fmt: skip
    for axes, (name, best) in zip(rows[:, 0], panels.items(), strict=True):
        places = {place for x in best.values() for place in x}
        everyone = sorted({ranks for ranks, _ in places})
        for ranks, seqlen in places:
            of_place = {y: _total(x[ranks, seqlen]) for y, x in best.items()
                        if (ranks, seqlen) in x}  # fmt: skip
            first = min(of_place, key=of_place.__getitem__)
            # Families that are the same plan there take as long.
            others = [x for x in of_place.values() if x > 1.0005 * of_place[first]]
            lead = 100 * (min(others, default=np.nan) / of_place[first] - 1)
            at = lengths.index(seqlen), everyone.index(ranks)
            axes.barh(at[1], 0.96, 0.94, at[0] - 0.48, color=STYLES[first][0], alpha=0.5)
            text = first.replace(" + ", "\n+ ") + f"\n{lead:.1f} %" * bool(others)
            axes.annotate(text, at, ha="center", va="center", fontsize=5)
        axes.set_xticks(range(len(lengths)), [_tokens(x) for x in lengths])
        axes.set_yticks(range(len(everyone)), [str(x) for x in everyone])
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylabel("ranks")
        axes.set_title(name)
    rows[-1, 0].set_xlabel("tokens (%: the next family takes so much longer)")
    return figure, _Legends(rows[:, 0]), scale.title


AT_SCALE = {
    "strong": draw_strong,
    "slopes": draw_slopes,
    "exposed": draw_exposed,
    "winners": draw_winners,
}


class _Legends:
    """The axes of all panels, in one legend, each label once."""

    def __init__(self, panels) -> None:
        self._panels = panels

    def get_legend_handles_labels(self) -> tuple[list, list]:
        """As matplotlib's Axes have it."""
        found = {}
        for axes in self._panels:
            for handle, label in zip(*axes.get_legend_handles_labels()):
                found.setdefault(label, handle)
        return list(found.values()), list(found)


def _by_ranks(plt, scale: Scale, width: float, draw, value):
    """A panel for each machine and network: a value by ranks, at one length."""
    panels = {
        name: {
            y: x
            for y, of in best.items()
            if (x := {k: e for k, e in of.items() if k[1] == scale.seqlen})
        }
        for name, best in scale.best().items()
    }
    panels = {name: best for name, best in panels.items() if best}
    figure, rows = plt.subplots(
        *(len(panels), 1), squeeze=False, figsize=(width, (0.3 + 0.5 * len(panels)) * width)
    )
    for axes, (name, best) in zip(rows[:, 0], panels.items(), strict=True):
        draw(axes, best)
        for family, x in best.items():
            colour, marker, line = STYLES[family]
            ranks = sorted(n for n, _ in x)
            axes.plot(ranks, [value(x[n, scale.seqlen]) for n in ranks], color=colour,
                      marker=marker, linestyle=line, label=family)  # fmt: skip
        log_ranks(axes, sorted({n for x in best.values() for n, _ in x}))
        axes.set_xlabel("ranks" if axes is rows[-1, 0] else "")
        axes.set_title(name)
    return figure, _Legends(rows[:, 0]), f"{scale.title}, {_tokens(scale.seqlen)} tokens"


def _workload(x: Entry) -> tuple:
    return (*(x[y] for y in WORKLOAD), int(x["seqlen"]))


def _total(x: Entry) -> float:
    return seconds(x, "simulated")


def _waiting(x: Entry) -> float:
    """Seconds that ranks wait, in the mean."""
    return seconds({**x, **{y: x[f"{y} wait"] for y in x if f"{y} wait" in x}}, "simulated")


def _tokens(seqlen: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if seqlen % size == 0:
            return f"{seqlen // size}{unit}"
    return str(seqlen)
