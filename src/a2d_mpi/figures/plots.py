"""The figures of `drivers/plot.py results`; no MPI import."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from textwrap import fill

import numpy as np

from a2d_mpi.experiments.benchmark import SCHEMA, read_benchmark, read_entries
from a2d_mpi.experiments.gpt_files import read_losses, read_steps
from a2d_mpi.experiments.results import TIMED_PARTS as SPAN_PARTS
from a2d_mpi.experiments.results import Result, phases_of
from a2d_mpi.experiments.summary import PARTS, Summary, best_of_families, in_order, summarise
from a2d_mpi.experiments.trace import read_trace
from a2d_mpi.figures.crossover_plots import draw_crossover, read_crossover
from a2d_mpi.figures.kernel_plots import draw_kernels
from a2d_mpi.figures.loss_plots import draw_losses
from a2d_mpi.figures.pictures import (
    FILLS,
    STYLES,
    check_picture,
    log_ranks,
    no_formulas,
    plain_ticks,
    pyplot,
    save,
)
from a2d_mpi.figures.scale_plots import AT_SCALE, draw_times, read_scale
from a2d_mpi.figures.step_plots import DRAWN
from a2d_mpi.figures.trace_plots import draw_trace
from a2d_mpi.schedules import METHODS

SETTINGS = {
    "font.size": 7, "legend.fontsize": 6.5, "axes.titlesize": 7, "savefig.dpi": 300,
    "lines.linewidth": 1.2, "lines.markersize": 4, "lines.markerfacecolor": "none",
    "hatch.linewidth": 0.4, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
PHASES = {"forward": ["forward"], "backward": ["backward"], "both": None}
WIDTH = 8 / 2.54  # inches
LINE = 64  # characters of a title
MOST_PLANS = 12  # bars of one figure
Figure = Callable[[Summary], float]  # one number of a result


def plot(args: argparse.Namespace) -> int:
    """Draw the figures that are asked for; returns the exit code."""
    names, formats = ([x.strip() for x in text.split(",")] for text in (args.what, args.format))
    read, figures = Choice, FIGURES
    if len(names) == 1 and names[0] in OTHERS:
        read, draw = OTHERS[names[0]]
        columns = 2 if names[0] in AT_SCALE else 3
        figures = {names[0]: lambda plt, found: _finish(*draw(plt, found, WIDTH), columns)}
    chosen = ("--what", names, figures), ("--format", formats, ("png", "svg"))
    for option, given, known in chosen:
        if unknown := [x for x in given if x not in known]:
            raise ValueError(f"{option}: {unknown[0]!r} is none of {', '.join(known)}")
    chosen = read(args)
    plt = pyplot(**SETTINGS)
    os.makedirs(args.folder, exist_ok=True)
    for name, kind in product(names, formats):
        check_picture(Path(args.folder, f"{name}.{kind}"))
    missing = []
    for name in names:
        try:
            figure = figures[name](plt, chosen)
        except NothingToDraw as error:
            missing.append(f"{name}: {error}")
            continue
        for kind in formats:
            path = Path(args.folder, f"{name}.{kind}")
            save(figure, path)
            print(path)
        plt.close(figure)
    if len(missing) == len(names):
        raise ValueError("; ".join(missing))
    for what in missing:
        print(f"plot.py: not drawn: {what}", file=sys.stderr)
    return 0


class NothingToDraw(ValueError):
    """The file holds nothing for a figure."""


class Choice:
    """The results of a file that are to be drawn.

    Attributes
    ----------
    all : list of Summary
        Of the phase that was asked for.
    these : list of Summary
        Of one workload.
    ranks : int
    run : Result
        For the timeline.
    """

    def __init__(self, args) -> None:
        results, phases = read_benchmark(args.results), PHASES[args.phase]
        usable = [x for x in results.values() if set(phases or ()) <= set(phases_of(x))]
        if not usable:
            raise ValueError(f"{args.results} has no result to plot")
        self.all = [summarise(result, phases) for result in usable]
        counts = Counter(name for name, _ in {(x.workload, x.ranks) for x in self.all})
        of_each = Counter(x.workload for x in self.all)
        usual = max(counts, key=lambda x: (counts[x], of_each[x], x))
        self.workload = usual if args.workload is None else args.workload
        self.these = [x for x in self.all if x.workload == self.workload]
        if not self.these:
            raise ValueError(f"no workload {self.workload!r}: {', '.join(sorted(counts))}")
        most = max(x.ranks for x in self.these)
        self.ranks, self.phase = most if args.ranks is None else args.ranks, args.phase
        here = [x for x in self.these if x.ranks == self.ranks]
        if not here:
            raise ValueError(f"{self.workload} was not run on {self.ranks} ranks")
        first = next(iter(METHODS))

        def rank(x: Summary) -> tuple:
            return not results[x.name].spans, x.method != first, not x.overlap, x.seconds

        fastest = min(here, key=rank)
        name = fastest.name if args.run is None else args.run
        if name not in results:
            raise ValueError(f"no run {name!r} in {args.results}")
        self.run: Result = results[name]
        # What names the workload, even if the timeline is of another one.
        self.config = next(results[x.name].config for x in self.these)

    def families(self, key: Figure, fewest: int = 1) -> dict[str, list[Summary]]:
        """By method: the plan of least `key` at every number of ranks from `fewest` on."""
        # Those that communicate and compute in turn are left to `phases`, where both were run.
        whole = [x for x in self.these if x.overlap] or self.these
        found = best_of_families((x for x in whole if x.ranks >= fewest), key)
        return {name: found[name] for name in in_order(found)}

    @property
    def title(self) -> str:
        """The workload in words."""
        c = self.config
        heads = f"{c['nheads']} heads" + f"/{c['nheads_kv']}" * (c["nheads"] != c["nheads_kv"])
        phase = {"both": "fwd + bwd" if c["backward"] else "fwd"}.get(self.phase, self.phase)
        shape = f"{c['seqlen']} tokens, {heads} x {c['headdim']}"
        return f"{c['mask']}, {shape}, {c['dtype']}, {phase}"


def draw_scaling(plt, choice: Choice):
    """Time by number of ranks."""
    families = choice.families(lambda x: x.seconds)
    if len({x.ranks for xs in families.values() for x in xs}) == 1:
        return _bars(plt, choice, families, lambda x: 1e3 * x.seconds, "time, ms")
    return _finish(draw_times(plt, {"": families}, WIDTH), choice.title)


def draw_phases(plt, choice: Choice):
    """Bars of one workload at one number of ranks."""
    xs = sorted((x for x in choice.these if x.ranks == choice.ranks), key=lambda x: x.seconds)
    shown = xs[:MOST_PLANS]
    figure, axes = plt.subplots(figsize=(WIDTH, 0.35 * WIDTH + 0.17 * len(shown)))
    left, where = np.zeros(len(shown)), np.arange(len(shown))
    for part in PARTS:
        lengths = np.array([1e3 * x.parts[part] for x in shown])
        colour, hatch = FILLS[part]
        label = {"wait": "exposed wait"}.get(part, part)
        axes.barh(where, lengths, 0.72, left, color=colour, hatch=hatch, label=label,
                  edgecolor="white", linewidth=0.3)  # fmt: skip
        left += lengths
    axes.set_yticks(where, [x.plan.removesuffix("@rcu") for x in shown], fontsize=6)
    axes.invert_yaxis()
    best = f" (best {len(shown)} of {len(xs)})" * (len(shown) < len(xs))
    axes.set_xlabel(f"slowest of {choice.ranks} ranks, ms{best}")
    axes.xaxis.set_major_locator(plt.MaxNLocator(5))  # five digits have room
    return _finish(figure, choice.title, columns=4)


def draw_bytes(plt, choice: Choice):
    """Bytes by number of ranks."""
    if not (families := choice.families(lambda x: x.received, fewest=2)):
        raise NothingToDraw("no run on more than one rank")
    everyone = sorted({x.ranks for xs in families.values() for x in xs})
    bounds = {x.ranks: x.bound for xs in families.values() for x in xs if x.bound > 0}
    if len(everyone) == 1:
        bound = bounds.get(everyone[0], math.nan) / 1e6
        return _bars(plt, choice, families, lambda x: x.received / 1e6, "MB received by a rank",
                     lambda x: x.formula / 1e6, bound)  # fmt: skip
    figure, axes = plt.subplots(figsize=(WIDTH, 0.95 * WIDTH))
    axes.set_yscale("log")
    for name, xs in families.items():
        colour, marker, line = STYLES[name]
        ranks = [x.ranks for x in xs]
        axes.plot(ranks, [x.formula / 1e6 for x in xs], color=colour, linestyle=line)
        received = [x.received / 1e6 for x in xs]
        axes.plot(ranks, received, color=colour, marker=marker, linestyle="none")
        axes.plot([], [], color=colour, marker=marker, linestyle=line, label=name)
    if bounds:
        # It may be next to nothing on few ranks: then the line leaves below.
        axes.set_ylim(bottom=min(x.formula for xs in families.values() for x in xs) / 5e6)
        axes.plot(sorted(bounds), [bounds[x] / 1e6 for x in sorted(bounds)], color="black",
                  linewidth=0.8, label="bound without heads")  # fmt: skip
    log_ranks(axes, everyone)
    plain_ticks(axes.yaxis)
    axes.set_ylabel("MB received by a rank\n(points counted, lines formula)")
    return _finish(figure, choice.title)


def draw_model(plt, choice: Choice):
    """Predicted against measured."""
    if not (known := [x for x in choice.all if not math.isnan(x.predicted)]):
        raise NothingToDraw("no predictions in the file (bench.py --profile)")
    figure, axes = plt.subplots(figsize=(WIDTH, 0.95 * WIDTH))
    both = [1e3 * y for x in known for y in (x.seconds, x.predicted)]
    ends = np.array([min(both) / 1.5, max(both) * 1.5])
    for band, grey in ((0.3, "#EEEEEE"), (0.15, "#CCCCCC")):
        axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color=grey, linewidth=0)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for name in in_order(x.family for x in known):
        colour, marker, _ = STYLES[name]
        these = [(1e3 * x.seconds, 1e3 * x.predicted) for x in known if x.family == name]
        axes.scatter(*zip(*these), 9, "none", marker=marker, edgecolors=colour, label=name)
    off = np.array([abs(x.predicted / x.seconds - 1) for x in known])
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms")
    axes.set_ylabel("predicted, ms")
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)
    within = ", ".join(f"{100 * np.mean(off <= x):.0f} % within {100 * x:.0f} %"
                       for x in (0.15, 0.3))  # fmt: skip
    return _finish(figure, f"{len(known)} runs: {within}")


def draw_timeline(plt, choice: Choice):
    """Spans of every rank."""
    result, c = choice.run, choice.run.config
    if not result.spans:
        raise NothingToDraw(f"{c['name']} was kept without spans (bench.py --spans)")
    phases, ranks = phases_of(result), int(c["ranks"])
    figure, all_axes = plt.subplots(
        1, len(phases), figsize=(WIDTH, 0.45 * WIDTH + min(0.16 * ranks, 4.0)),
        sharey=True, squeeze=False,
    )  # fmt: skip
    for phase, axes in zip(phases, all_axes[0]):
        spans = result.spans[phase]
        for part in ("other", "compute", "merge", "wait"):
            code = SPAN_PARTS.index("total" if part == "other" else part)
            colour, hatch = FILLS[part]
            for rank in range(ranks):
                these = spans[(spans["rank"] == rank) & (spans["part"] == code)]
                bars = [(1e3 * x["start"], 1e3 * (x["end"] - x["start"])) for x in these]
                label = part if rank == 0 and phase == "forward" else None
                axes.broken_barh(bars, (rank - 0.4, 0.8), facecolor=colour, hatch=hatch,
                                 edgecolor="white", linewidth=0, label=label)  # fmt: skip
        axes.set_xlabel(f"{phase}, ms")
        axes.set_xlim(0, 1e3 * spans["end"].max())
        axes.set_ylim(ranks - 0.4, -0.6)
    all_axes[0, 0].set_ylabel("rank")
    all_axes[0, 0].yaxis.set_major_locator(plt.MaxNLocator(8, integer=True))
    title = f"{summarise(result).plan.removesuffix('@rcu')}, {c['mask']}, {c['seqlen']} tokens"
    return _finish(figure, title, columns=4)


_DRAWN = (draw_scaling, draw_phases, draw_bytes, draw_model, draw_timeline)
FIGURES = {draw.__name__.removeprefix("draw_"): draw for draw in _DRAWN}
# Of files of other kinds: how to read them, and how to draw.
OTHERS = {
    "training": (lambda args: read_losses(args.results), draw_losses),
    "crossover": (read_crossover, draw_crossover),
    "kernels": (lambda args: read_entries(args.results, SCHEMA, "figures"), draw_kernels),
    **{
        x: (lambda args: read_scale(args.results, args.workload), draw)
        for x, draw in AT_SCALE.items()
    },
    **{x: (lambda args: read_steps(args.results), draw) for x, draw in DRAWN.items()},
    "trace": (lambda args: read_trace(args.results), draw_trace),
}


def _bars(
    plt, choice: Choice, families: dict[str, list[Summary]], value: Figure, unit: str,
    formula: Figure | None = None, bound: float = math.nan,
):  # fmt: skip
    """A bar for the plan of each method, least first, where there is one number of ranks."""
    xs = sorted(((value(x), name, x) for name, (x,) in families.items()), key=lambda x: x[:2])
    figure, axes = plt.subplots(figsize=(WIDTH, 0.4 * WIDTH + 0.2 * len(xs)))
    for y, (length, name, x) in enumerate(xs):
        axes.barh(y, length, 0.7, color=STYLES[name][0])
        times = f" ({length / xs[0][0]:.2f}x)" if xs[0][0] else ""
        axes.annotate(f" {length:.3g}{times}", (length, y), va="center", fontsize=6)
        if formula:
            axes.plot(formula(x), y, "|", color="black", label="formula" if y == 0 else None)
    if not math.isnan(bound):
        axes.axvline(bound, color="black", linewidth=0.8, label="bound without heads")
    axes.set_yticks(range(len(xs)), [x.plan.removesuffix("@rcu") for *_, x in xs], fontsize=6)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(plt.MaxNLocator(4))
    axes.set_xlabel(f"{unit}\n(run on {xs[0][2].ranks} ranks only)")
    return _finish(figure, choice.title)


def _finish(figure, title: str, columns: int = 2):
    """Title and legend above, so that they hide nothing, in columns for which there is room."""
    handles = {}  # by label: of all panels, each once
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.set_layout_engine("constrained")
    for number in range(columns, 0, -1):
        legend = figure.legend(
            handles.values(), handles, title=fill(title, LINE), loc="outside upper center",
            ncols=number, frameon=False, columnspacing=1.2, handlelength=2.2, borderaxespad=0.1,
            title_fontsize=6.5,
        )  # fmt: skip
        no_formulas(figure)
        if number == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return figure
        legend.remove()
