"""Figures of drivers/simulate.py: how plans scale, by a simulator; no MPI import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from a2d_mpi.experiments.pictures import STYLES, log_ranks, plain_ticks
from a2d_mpi.experiments.scale import Best, Entry, Scale, in_short, power, total
from a2d_mpi.experiments.simulate import seconds
from a2d_mpi.experiments.study import RING

Choice = Callable[[int, int], bool]  # of ranks and tokens


def draw_strong(plt, scale: Scale, width: float):
    """Time by number of ranks, with per cent of ideal from the fastest on the fewest."""
    here = f"{in_short(scale.seqlen)} tokens"
    return _scaling(plt, scale, width, here, lambda _, n: n == scale.seqlen, -1)


def draw_weak(plt, scale: Scale, width: float):
    """Likewise, as many tokens a rank: the work of each grows with the ranks."""
    places = {(x["ranks"], x["seqlen"]) for x in scale.entries}
    each = Counter(n // ranks for ranks, n in places if n % ranks == 0)
    usual = max(each, key=lambda x: (each[x], -x))
    here = f"{in_short(usual)} tokens a rank"
    return _scaling(plt, scale, width, here, lambda ranks, n: n == usual * ranks, 1)


def draw_slopes(plt, scale: Scale, width: float):
    """Time by number of ranks, and at the end of each line the power of the ranks as fitted."""

    def draw(axes, best: Best) -> None:
        for family, x in best.items():
            if len(x) > 1:
                times = {n: _milliseconds(y) for (n, _), y in x.items()}
                axes.annotate(f" P^{power(times):.2f}", max(times.items()), fontsize=5,
                              color=STYLES[family][0])  # fmt: skip
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.set_ylabel("time, ms")

    return _by_ranks(plt, scale, width, draw, _milliseconds)


def draw_exposed(plt, scale: Scale, width: float):
    """Share of the time that ranks wait for messages, in the mean."""

    def draw(axes, best: Best) -> None:
        axes.set_ylim(0, 100)
        axes.set_ylabel("exposed, %")

    return _by_ranks(plt, scale, width, draw, lambda x: 100 * _waiting(x) / total(x))


def draw_winners(plt, scale: Scale, width: float):
    """The fastest family by ranks and tokens, and how much longer the other sort takes.

    Grids of all kinds are one sort, rings the other.
    """
    panels = scale.best()
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
            of_place = {y: total(x[ranks, seqlen]) for y, x in best.items()
                        if (ranks, seqlen) in x}  # fmt: skip
            first = min(of_place, key=of_place.__getitem__)
            others = [x for y, x in of_place.items() if (RING in y) != (RING in first)]
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
    return figure, _Legends(rows[:, 0]), scale.title


AT_SCALE = {
    "strong": draw_strong,
    "weak": draw_weak,
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


def _scaling(plt, scale: Scale, width: float, here: str, chosen: Choice, exponent: int):
    """Time by number of ranks; ideal is as the ranks to a power."""

    def draw(axes, best: Best) -> None:
        times = {}  # of all families, by ranks
        for x in best.values():
            for (ranks, _), entry in x.items():
                times.setdefault(ranks, []).append(_milliseconds(entry))
        fewest = min(times)
        ideal = {n: min(times[fewest]) * (n / fewest) ** exponent for n in sorted(times)}
        axes.plot(*zip(*ideal.items()), color="black", linewidth=0.8, label="ideal")
        for ranks in [*ideal][1:]:
            for y, up in ((min(times[ranks]), -8), (max(times[ranks]), 8)):
                axes.annotate(f"{100 * ideal[ranks] / y:.0f} %", (ranks, y), (0, up), fontsize=5,
                              textcoords="offset points", ha="center", va="center")  # fmt: skip
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
        axes.margins(y=0.15)
        axes.set_ylabel("time, ms\n(% of ideal)")

    return _by_ranks(plt, scale, width, draw, _milliseconds, here, chosen)


def _by_ranks(
    plt, scale: Scale, width: float, draw, value, here: str = "", chosen: Choice | None = None
):
    """A panel for each machine and network: a value by ranks, at one length for each number."""
    here = here or f"{in_short(scale.seqlen)} tokens"
    chosen = chosen or (lambda ranks, seqlen: seqlen == scale.seqlen)
    panels = {
        name: {
            y: x for y, of in best.items() if (x := {k: e for k, e in of.items() if chosen(*k)})
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
            ranks, entries = zip(*((n, e) for (n, _), e in sorted(x.items(), key=lambda y: y[0])))
            axes.plot(ranks, [value(e) for e in entries], color=colour, marker=marker,
                      linestyle=line, label=family)  # fmt: skip
        log_ranks(axes, sorted({n for x in best.values() for n, _ in x}))
        axes.set_xlabel("ranks" if axes is rows[-1, 0] else "")
        axes.set_title(name)
    return figure, _Legends(rows[:, 0]), f"{scale.title}, {here}"


def _milliseconds(x: Entry) -> float:
    return 1e3 * total(x)


def _waiting(x: Entry) -> float:
    """Seconds that ranks wait, in the mean."""
    return seconds({**x, **{y: x[f"{y} wait"] for y in x if f"{y} wait" in x}}, "simulated")
