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

import numpy as np

from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import (
    BENCHMARK_SCHEMA,
    PARTS,
    TRAINING_SCHEMA,
    Summary,
    best_of_families,
    in_order,
    read_measured,
)
from a2d_mpi.experiments.trace import read_trace
from a2d_mpi.figures.crossover_plots import draw_crossover, read_crossover
from a2d_mpi.figures.file_plots import draw_kernels, draw_losses, draw_trace
from a2d_mpi.figures.pictures import (
    FILLS,
    SETTINGS,
    WIDTH,
    check_picture,
    finish,
    plain_ticks,
    pyplot,
    save,
    style,
    workload_title,
)
from a2d_mpi.figures.scale_plots import AT_SCALE, draw_by_ranks, read_scale
from a2d_mpi.planning.planner import duration

MOST_PLANS = 16  # bars of one figure
Figure = Callable[[Summary], float]  # one number of a result


def plot(args: argparse.Namespace) -> int:
    """Draw the figures that are asked for; returns the exit code."""
    names, formats = args.what, args.format
    read, figures = next(x for x in FILE_KINDS if names[0] in x[1])
    if others := [x for x in names if x not in figures]:
        raise ValueError(
            f"--what: {others[0]!r} is none of {', '.join(figures)}, as {names[0]!r} is"
        )
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
        All results.
    of_workload : list of Summary
        The results of one workload.
    ranks : int
        The number of ranks of `phases`.
    """

    def __init__(self, args) -> None:
        self.all = read_measured(args.results)
        if not self.all:
            raise ValueError(f"{args.results} has no result to plot")
        counts = Counter(name for name, _ in {(x.workload, x.ranks) for x in self.all})
        of_each = Counter(x.workload for x in self.all)
        usual = max(counts, key=lambda x: (counts[x], of_each[x], x))
        self.workload = usual if args.workload is None else args.workload
        self.of_workload = [x for x in self.all if x.workload == self.workload]
        if not self.of_workload:
            raise ValueError(f"no workload {self.workload!r}: {', '.join(sorted(counts))}")
        most = max(x.ranks for x in self.of_workload)
        self.ranks = most if args.ranks is None else args.ranks
        if self.ranks not in {x.ranks for x in self.of_workload}:
            raise ValueError(f"{self.workload} was not run on {self.ranks} ranks")
        self.config = self.of_workload[0].config

    def families(self, key: Figure, fewest: int = 1) -> dict[str, list[Summary]]:
        """Find each method's plan of least `key` at every number of ranks from `fewest` on."""
        # Only `phases` shows plans that communicate and compute in turn, if both kinds were run.
        plans = [x for x in self.of_workload if x.overlap] or self.of_workload
        best = best_of_families((x for x in plans if x.ranks >= fewest), key)
        return {name: best[name] for name in in_order(best)}

    @property
    def title(self) -> str:
        """Describe the workload."""
        return workload_title(self.config, self.config["seqlen"])


def draw_scaling(plt, choice: Choice):
    """Draw per cent of ideal scaling by number of ranks."""
    families = choice.families(lambda x: x.seconds)
    plans = [x for of_family in families.values() for x in of_family]
    first = min(plans, key=lambda x: (x.ranks, x.seconds))
    ideal = 100 * first.seconds * first.ranks  # of one rank, times 100 %
    speeds = {
        name: {x.ranks: ideal / x.ranks / x.seconds for x in of_family}
        for name, of_family in families.items()
    }
    title = f"100 %: {duration(first.seconds)} on {first.ranks} ranks"
    return finish(draw_by_ranks(plt, {title: speeds}, "speed, % of ideal"), choice.title)


def draw_phases(plt, choice: Choice):
    """Draw the times of the plans of one workload, and the shares of their parts."""
    plans = [x for x in choice.of_workload if x.ranks == choice.ranks]
    shown = sorted(plans, key=lambda x: x.seconds)[:MOST_PLANS]
    best = 1e3 * shown[0].seconds
    figure, (times, shares) = plt.subplots(
        1, 2, sharey=True, figsize=(WIDTH, 0.8 + 0.17 * len(shown))
    )
    for y, x in enumerate(shown):
        ms = 1e3 * x.seconds
        times.plot(ms, y, **style(x.family))
        times.annotate(f"  {float(f'{ms:.3g}'):g} ({ms / best:.2f}x)", (ms, y), va="center")
    left = np.zeros(len(shown))
    for part in PARTS:
        lengths = [100 * x.parts[part] / x.seconds for x in shown]
        colour, hatch = FILLS[part]
        shares.barh(range(len(shown)), lengths, 0.72, left, color=colour, hatch=hatch,
                    edgecolor="white", linewidth=0.3, label=part)  # fmt: skip
        left += lengths
    names = [x.plan.removesuffix("@rcu") + _alias(x) for x in shown]
    times.set_yticks(range(len(shown)), names)
    times.invert_yaxis()
    times.set_xscale("log")
    times.set_xlim(best / 1.5, 6e3 * shown[-1].seconds)
    plain_ticks(times.xaxis, (1, 3))
    times.set_xlabel(f"slowest of {choice.ranks} ranks, ms (ratio to the fastest plan)")
    shares.set(xlim=(0, 100), xlabel="% of the time of the slowest rank")
    left_out = f"; the fastest {len(shown)} of {len(plans)} plans" * (len(shown) < len(plans))
    return finish(figure, choice.title + left_out)


def _alias(plan: Summary) -> str:
    """Return the common name of a plan in brackets, if it is not the name of its method."""
    name = plan.family.partition(" + ")[0]
    return f" ({name})" * (name != plan.method)


def draw_bytes(plt, choice: Choice):
    """Draw bytes by number of ranks: counted, by the formula, and the lower bound."""
    if not (families := choice.families(lambda x: x.received, fewest=2)):
        raise NothingToDraw("no run on more than one rank")
    counted = {name: {x.ranks: x.received / 1e6 for x in xs} for name, xs in families.items()}
    figure = draw_by_ranks(plt, {"": counted}, "MB received by a rank", log=True)
    bounds = {x.ranks: x.bound / 1e6 for xs in families.values() for x in xs if x.bound > 0}
    for axes in figure.axes:
        for xs in families.values():
            axes.plot([x.ranks for x in xs], [x.formula / 1e6 for x in xs], "k_", markersize=9,
                      label="formula", zorder=3)  # fmt: skip
        if bounds:
            axes.plot(*zip(*sorted(bounds.items())), "k:", label="bound without heads")
            # The bound may be next to nothing on few ranks. Then the line leaves the axes.
            axes.set_ylim(bottom=min(min(x.values()) for x in counted.values()) / 5)
    return finish(figure, choice.title)


def draw_model(plt, choice: Choice):
    """Draw predicted against measured times."""
    if not (runs := [x for x in choice.all if not math.isnan(x.predicted)]):
        raise NothingToDraw("no predictions in the file (bench.py --profile)")
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 0.5 * WIDTH), sharex=True, sharey=True)
    both = [1e3 * y for x in runs for y in (x.seconds, x.predicted)]
    ends = np.array([min(both) / 1.5, max(both) * 1.5])
    for axes, heads in zip(panels, (False, True)):
        for band, grey in ((0.3, "#EEEEEE"), (0.15, "#CCCCCC")):
            axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color=grey, linewidth=0)
        axes.plot(ends, ends, color="black", linewidth=0.8)
        for name in in_order(x.family for x in runs if (" + heads" in x.family) == heads):
            of_family = [x for x in runs if x.family == name]
            axes.plot([1e3 * x.seconds for x in of_family], [1e3 * x.predicted for x in of_family],
                      linestyle="none", markersize=3, label=name.partition(" + ")[0],
                      **style(name))  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms")
        axes.set_title("ranks share the heads" if heads else "every rank has all heads")
        for axis in (axes.xaxis, axes.yaxis):
            plain_ticks(axis)
    panels[0].set_ylabel("predicted, ms")
    off = np.array([abs(x.predicted / x.seconds - 1) for x in runs])
    within = ", ".join(f"{100 * np.mean(off <= x):.0f} % within {100 * x:.0f} %"
                       for x in (0.15, 0.3))  # fmt: skip
    return finish(figure, f"{len(runs)} runs: {within} of the measured time (grey bands)")


_DRAWN = (draw_scaling, draw_phases, draw_bytes, draw_model)
FIGURES = {draw.__name__.removeprefix("draw_"): draw for draw in _DRAWN}
# A kind of file: how to read it, and how to draw each of its figures.
FILE_KINDS: list[tuple[Callable, dict[str, Callable]]] = [
    (Choice, FIGURES),
    (lambda args: read_file(args.results, TRAINING_SCHEMA), {"training": draw_losses}),
    (lambda args: read_file(args.results, BENCHMARK_SCHEMA)["figures"], {"kernels": draw_kernels}),
    (lambda args: read_scale(args.results, args.workload), AT_SCALE),
    (read_crossover, {"crossover": draw_crossover}),
    (lambda args: read_trace(args.results), {"trace": draw_trace}),
]
OTHERS = [name for _, figures in FILE_KINDS[1:] for name in figures]
