"""The figures of `drivers/plot.py results` that compare plans; no MPI import."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.plan import read_summaries
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
from a2d_mpi.figures.file_plots import (
    draw_crossover,
    draw_kernels,
    draw_losses,
    draw_trace,
    read_crossover,
)
from a2d_mpi.figures.pictures import (
    FILLS,
    SETTINGS,
    WIDTH,
    finish,
    in_short,
    nodes_of,
    plain_ticks,
    pyplot,
    save,
    style,
    workload_title,
)
from a2d_mpi.planning.planner import duration

MOST_PLANS = 16  # bars of one figure
WORKLOAD = "mask", "nheads", "nheads_kv", "headdim", "dtype", "backward"


def plot(args: argparse.Namespace) -> int:
    """Draw the figures that are asked for; returns the exit code."""
    read, figures = next(x for x in FILE_KINDS if args.what[0] in x[1])
    if others := [x for x in args.what if x not in figures]:
        raise ValueError(
            f"--what: {others[0]!r} is none of {', '.join(figures)}, as {args.what[0]!r} is"
        )
    chosen = read(args)
    plt = pyplot(**SETTINGS)
    os.makedirs(args.folder, exist_ok=True)
    missing = []
    for name in args.what:
        try:
            figure = figures[name](plt, chosen)
        except ValueError as error:
            missing.append(f"{name}: {error}")
            continue
        for kind in args.format:
            path = Path(args.folder, f"{name}.{kind}")
            save(figure, path)
            print(path)
        plt.close(figure)
    if len(missing) == len(args.what):
        raise ValueError("; ".join(missing))
    for what in missing:
        print(f"plot.py: not drawn: {what}", file=sys.stderr)
    return 0


def _usual(workloads: Sequence, plans: Sequence[Summary]):
    """Return the workload that ran on the most numbers of ranks, and then with the most plans.

    `workloads` has the workload of each plan.
    """
    entries = Counter(workloads)
    ranks = Counter(x for x, _ in {(x, y.ranks) for x, y in zip(workloads, plans)})
    return max(entries, key=lambda x: (ranks[x], entries[x], x))


@dataclass
class Runs:
    """The runs of a benchmark that are to be drawn.

    Attributes
    ----------
    all : list of Summary
        All runs.
    of_workload : list of Summary
        The runs of one workload.
    ranks : int
        The number of ranks of `phases`.
    """

    all: list[Summary]
    of_workload: list[Summary]
    ranks: int

    def families(
        self, key: Callable[[Summary], float], fewest: int = 1
    ) -> dict[str, list[Summary]]:
        """Find each method's plan of least `key` at every number of ranks from `fewest` on."""
        # Only `phases` shows plans that communicate and compute in turn, if both kinds were run.
        plans = [x for x in self.of_workload if x.overlap] or self.of_workload
        best = best_of_families((x for x in plans if x.ranks >= fewest), key)
        return {name: best[name] for name in in_order(best)}

    @property
    def title(self) -> str:
        """Describe the workload."""
        config = self.of_workload[0].config
        return workload_title(config, config["seqlen"])


def read_runs(args: argparse.Namespace) -> Runs:
    """Read the runs that --workload and --ranks choose."""
    if not (runs := read_measured(args.results)):
        raise ValueError(f"{args.results} has no result to plot")
    names = [x.workload for x in runs]
    workload = args.workload or _usual(names, runs)
    shown = [x for x in runs if x.workload == workload]
    if not shown:
        raise ValueError(f"no workload {workload!r}: {', '.join(sorted({*names}))}")
    everyone = {x.ranks for x in shown}
    if args.ranks not in (None, *everyone):
        raise ValueError(f"{workload} was not run on {args.ranks} ranks")
    return Runs(runs, shown, args.ranks or max(everyone))


def draw_scaling(plt, runs: Runs):
    """Draw per cent of ideal scaling by number of ranks."""
    families = runs.families(lambda x: x.seconds)
    plans = [x for of_family in families.values() for x in of_family]
    first = min(plans, key=lambda x: (x.ranks, x.seconds))
    ideal = 100 * first.seconds * first.ranks  # of one rank, times 100 %
    speeds = {
        name: {x.ranks: ideal / x.ranks / x.seconds for x in of_family}
        for name, of_family in families.items()
    }
    title = f"100 %: {duration(first.seconds)} on {first.ranks} ranks"
    return finish(_by_ranks(plt, {title: speeds}, "speed, % of ideal"), runs.title)


def draw_phases(plt, runs: Runs):
    """Draw the times of the plans of one workload, and the shares of their parts."""
    plans = [x for x in runs.of_workload if x.ranks == runs.ranks]
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
    times.set_xlabel(f"slowest of {runs.ranks} ranks, ms (ratio to the fastest plan)")
    shares.set(xlim=(0, 100), xlabel="% of the time of the slowest rank")
    left_out = f"; the fastest {len(shown)} of {len(plans)} plans" * (len(shown) < len(plans))
    return finish(figure, runs.title + left_out)


def _alias(plan: Summary) -> str:
    """Return the common name of a plan in brackets, if it is not the name of its method."""
    name = plan.family.partition(" + ")[0]
    return f" ({name})" * (name != plan.method)


def draw_bytes(plt, runs: Runs):
    """Draw bytes by number of ranks: counted, by the formula, and the lower bound."""
    if not (families := runs.families(lambda x: x.received, fewest=2)):
        raise ValueError("no run on more than one rank")
    counted = {name: {x.ranks: x.received / 1e6 for x in xs} for name, xs in families.items()}
    figure = _by_ranks(plt, {"": counted}, "MB received by a rank", log=True)
    bounds = {x.ranks: x.bound / 1e6 for xs in families.values() for x in xs if x.bound > 0}
    for axes in figure.axes:
        for xs in families.values():
            axes.plot([x.ranks for x in xs], [x.formula / 1e6 for x in xs], "k_", markersize=9,
                      label="formula", zorder=3)  # fmt: skip
        if bounds:
            axes.plot(*zip(*sorted(bounds.items())), "k:", label="bound without heads")
            # The bound may be next to nothing on few ranks. Then the line leaves the axes.
            axes.set_ylim(bottom=min(min(x.values()) for x in counted.values()) / 5)
    return finish(figure, runs.title)


def draw_model(plt, runs: Runs):
    """Draw predicted against measured times."""
    if not (runs := [x for x in runs.all if not math.isnan(x.predicted)]):
        raise ValueError("no predictions in the file (bench.py --profile)")
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


@dataclass
class Scale:
    """The simulations of one workload with sequences of any length.

    Attributes
    ----------
    plans : dict of str to dict of str to dict of (int, int) to Summary
        The fastest plan by machine and network, family, and (ranks, tokens).
    seqlen : int
        The length of the figures that show one length.
    title : str
    """

    plans: dict[str, dict[str, dict[tuple[int, int], Summary]]]
    seqlen: int
    title: str


def read_scale(path: str | Path, part: str | None = None) -> Scale:
    """Read the simulations of a workload, with sequences of any length, from a file.

    `part` is a part of the workload's name.  Default: the workload with the most numbers of ranks,
    then with the most entries.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or has no simulation of this workload.
    """
    every = read_summaries(path)
    workloads = {x.name: (*(x.config[y] for y in WORKLOAD), x.config["seqlen"]) for x in every}
    named = [x for x in every if (part or "") in x.name]
    if not named:
        raise ValueError(f"no workload {part or ''!r} in {path}")
    *usual, seqlen = _usual([workloads[x.name] for x in named], named)
    panels: dict[str, dict[str, dict[tuple[int, int], Summary]]] = {}
    for x in every:
        *workload, tokens = workloads[x.name]
        if workload == usual:
            # An axis has the number of ranks, so the name has no number of nodes.
            panel = f"{nodes_of(x.config['machine'])}, {x.config['network']}"
            best = panels.setdefault(panel, {}).setdefault(x.family, {})
            best[x.ranks, tokens] = min(best.get((x.ranks, tokens), x), x, key=lambda y: y.seconds)
    plans = {y: {name: x[name] for name in in_order(x)} for y, x in panels.items()}
    config = dict(zip(WORKLOAD, usual))
    return Scale(plans, seqlen, f"simulated: {workload_title(config)}")


def draw_slopes(plt, scale: Scale):
    """Draw time by number of ranks, and at the end of each line the fitted power of the ranks."""
    times: dict[str, dict[str, dict[int, float]]] = {}
    for panel, families in scale.plans.items():
        for name, best in families.items():
            ms = {
                ranks: 1e3 * x.seconds
                for (ranks, tokens), x in sorted(best.items(), key=lambda y: y[0])
                if tokens == scale.seqlen
            }
            if ms:
                times.setdefault(panel, {})[name] = ms
    figure = _by_ranks(plt, times, "time, ms", log=True)
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
    places = {x for panel in scale.plans.values() for best in panel.values() for x in best}
    everyone, lengths = (sorted(set(x)) for x in zip(*places))
    size = WIDTH, 1 + 0.3 * len(everyone)
    figure, (row,) = plt.subplots(1, len(scale.plans), squeeze=False, sharey=True, figsize=size)
    for axes, (title, panel) in zip(row, scale.plans.items(), strict=True):
        for place in sorted({x for best in panel.values() for x in best}):
            seconds = {y: x[place].seconds for y, x in panel.items() if place in x}
            first = min(seconds, key=seconds.__getitem__)
            others = [x for y, x in seconds.items() if ("ring" in y) != ("ring" in first)]
            x, y = lengths.index(place[1]), everyone.index(place[0])
            axes.barh(y, 0.96, 0.94, x - 0.48, color=style(first)["color"], alpha=0.3)
            axes.plot(x, y + 0.15, linestyle="none", label=first, **style(first))
            if others:
                lead = 100 * (min(others) / seconds[first] - 1)
                text = f"{lead:.{int(lead < 10)}f} %"
                axes.annotate(text, (x, y - 0.25), ha="center", va="center")
        axes.set_xticks(range(len(lengths)), [in_short(x) for x in lengths])
        axes.set_yticks(range(len(everyone)), everyone)
        axes.set(xlim=(-0.5, len(lengths) - 0.5), title=title, xlabel="tokens")
    row[0].set_ylabel("ranks")
    kinds = "number: how much longer the fastest plan of the other kind takes (grid or ring)"
    return finish(figure, f"{scale.title}; {kinds}")


def _by_ranks(
    plt, panels: Mapping[str, Mapping[str, Mapping[int, float]]], what: str, log: bool = False
):
    """Draw a column for each panel: values by family and ranks.

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


# A kind of file: how to read it, and how to draw each of its figures.
FIGURES = {"scaling": draw_scaling, "phases": draw_phases, "bytes": draw_bytes,
           "model": draw_model}  # fmt: skip
AT_SCALE = {"slopes": draw_slopes, "winners": draw_winners}
FILE_KINDS: list[tuple[Callable, dict[str, Callable]]] = [
    (read_runs, FIGURES),
    (lambda args: read_file(args.results, TRAINING_SCHEMA), {"training": draw_losses}),
    (lambda args: read_file(args.results, BENCHMARK_SCHEMA)["figures"], {"kernels": draw_kernels}),
    (lambda args: read_scale(args.results, args.workload), AT_SCALE),
    (read_crossover, {"crossover": draw_crossover}),
    (lambda args: read_trace(args.results), {"trace": draw_trace}),
]
OTHERS = [name for _, figures in FILE_KINDS[1:] for name in figures]
