"""The figures of `drivers/plot.py results`; no MPI import."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np

from a2d_mpi.figures.pictures import (
    COLOURS,
    FILLS,
    SETTINGS,
    WIDTH,
    finish,
    plain_ticks,
    pyplot,
    save,
    style,
    workload_title,
)
from a2d_mpi.planning.planner import duration
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.results.hdf5 import read_file
from a2d_mpi.results.tables import (
    BENCHMARK_SCHEMA,
    FAMILIES,
    PARTS,
    Summary,
    family_of,
    kernel_speeds,
    plan_text,
    read_measured,
)


def plot(args: argparse.Namespace) -> int:
    """Draw the figures that are asked for; returns the exit code."""
    read, figures, program = next(x for x in FILE_KINDS if args.what[0] in x[1])
    if others := [x for x in args.what if x not in figures]:
        raise ValueError(
            f"--what: {others[0]!r} is none of {', '.join(figures)}, as {args.what[0]!r} is"
        )
    try:
        chosen = read(args)
    except ValueError as error:
        what = f"--what {args.what[0]} needs what {program} writes"
        raise ValueError(f"{error}; {what}, see --help for others") from None
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


def _order(family: str) -> tuple[int, str]:
    """Sort families as in `FAMILIES`; a user's methods come last."""
    return (FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)), family


def _best(
    plans: Iterable[Summary], key: Callable[[Summary], float]
) -> dict[str, dict[int, Summary]]:
    """Choose the plan of least `key` for each family and number of ranks, both in order."""
    best: dict[str, dict[int, Summary]] = {}
    for x in sorted(plans, key=lambda x: x.config["ranks"]):
        of_family = best.setdefault(family_of(x.config), {})
        of_family[x.config["ranks"]] = min(of_family.get(x.config["ranks"], x), x, key=key)
    return {name: best[name] for name in sorted(best, key=_order)}


# Benchmarks.


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

    def best(
        self, key: Callable[[Summary], float], fewest: int = 1
    ) -> dict[str, dict[int, Summary]]:
        """Find each method's plan of least `key` at every number of ranks from `fewest` on."""
        # Only `phases` shows plans that communicate and compute in turn, if both kinds were run.
        plans = [x for x in self.of_workload if x.config["overlap"]] or self.of_workload
        return _best((x for x in plans if x.config["ranks"] >= fewest), key)

    @property
    def title(self) -> str:
        """Describe the workload."""
        config = self.of_workload[0].config
        return workload_title(config, config["seqlen"])


def read_runs(args: argparse.Namespace) -> Runs:
    """Read the runs that --workload and --ranks choose."""
    if not (runs := read_measured(args.results)):
        raise ValueError(f"{args.results} has no result to plot")
    names = Counter(x.config["workload"] for x in runs)
    ranks = Counter(x for x, _ in {(x.config["workload"], x.config["ranks"]) for x in runs})
    workload = args.workload or max(names, key=lambda x: (ranks[x], names[x], x))
    shown = [x for x in runs if x.config["workload"] == workload]
    if not shown:
        raise ValueError(f"no workload {workload!r}: {', '.join(sorted(names))}")
    everyone = {x.config["ranks"] for x in shown}
    if args.ranks not in (None, *everyone):
        raise ValueError(f"{workload} was not run on {args.ranks} ranks")
    return Runs(runs, shown, args.ranks or max(everyone))


def draw_scaling(plt, runs: Runs):
    """Draw per cent of ideal scaling by number of ranks."""
    plans = runs.best(lambda x: x.seconds)
    each = (x for best in plans.values() for x in best.values())
    first = min(each, key=lambda x: (x.config["ranks"], x.seconds))
    ideal = 100 * first.seconds * first.config["ranks"]  # of one rank, times 100 %
    speeds = {
        name: {ranks: ideal / ranks / x.seconds for ranks, x in best.items()}
        for name, best in plans.items()
    }
    title = f"100 %: {duration(first.seconds)} on {first.config['ranks']} ranks"
    return finish(_by_ranks(plt, {title: speeds}, "speed, % of ideal"), runs.title)


def draw_phases(plt, runs: Runs):
    """Draw the times of the plans of one workload, and the shares of their parts."""
    shown = [x for x in runs.of_workload if x.config["ranks"] == runs.ranks]
    shown.sort(key=lambda x: x.seconds)
    best, names = 1e3 * shown[0].seconds, []
    figure, (times, shares) = plt.subplots(
        1, 2, sharey=True, figsize=(WIDTH, 0.8 + 0.17 * len(shown))
    )
    for y, x in enumerate(shown):
        ms, known = 1e3 * x.seconds, family_of(x.config).partition(" + ")[0]
        names.append(
            plan_text(x.config).removesuffix("@rcu")
            + f" ({known})" * (known != x.config["method"])
        )
        times.plot(ms, y, **style(family_of(x.config)))
        times.annotate(f"  {float(f'{ms:.3g}'):g} ({ms / best:.2f}x)", (ms, y), va="center")
    left = np.zeros(len(shown))
    for part in PARTS:
        lengths = [100 * x.parts[part] / x.seconds for x in shown]
        colour, hatch = FILLS[part]
        shares.barh(range(len(shown)), lengths, 0.72, left, color=colour, hatch=hatch,
                    edgecolor="white", linewidth=0.3, label=part)  # fmt: skip
        left += lengths
    times.set_yticks(range(len(shown)), names)
    times.invert_yaxis()
    times.set_xscale("log")
    times.set_xlim(best / 1.5, 6e3 * shown[-1].seconds)
    plain_ticks(times.xaxis, (1, 3))
    times.set_xlabel(f"slowest of {runs.ranks} ranks, ms (ratio to the fastest plan)")
    shares.set(xlim=(0, 100), xlabel="% of the time of the slowest rank")
    return finish(figure, runs.title)


def draw_bytes(plt, runs: Runs):
    """Draw bytes by number of ranks: counted, by the formula, and the lower bound."""
    if not (plans := runs.best(lambda x: x.received, fewest=2)):
        raise ValueError("no run on more than one rank")
    counted = {y: {ranks: x.received / 1e6 for ranks, x in plans[y].items()} for y in plans}
    figure = _by_ranks(plt, {"": counted}, "MB received by a rank", log=True)
    each = [x for best in plans.values() for x in best.values()]
    bounds = {x.config["ranks"]: x.bound / 1e6 for x in each if x.bound > 0}
    for axes in figure.axes:
        ranks, mb = zip(*((x.config["ranks"], x.formula / 1e6) for x in each))
        axes.plot(ranks, mb, "k_", markersize=9, label="formula", zorder=3)
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
        families = {
            family_of(x.config) for x in runs if (" + heads" in family_of(x.config)) == heads
        }
        for name in sorted(families, key=_order):
            of_family = [x for x in runs if family_of(x.config) == name]
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


# When 2-D attention matters: the folder crossover of `jobs/run.py study` has one workload on
# emulated clusters whose links differ, with a profile beside each file of results.


@dataclass
class Crossover:
    """How much faster than the ring the best plan of each family is.

    Attributes
    ----------
    gains : dict of str to list of (float, float)
        By family and ordered: seconds of computing / seconds of transfers of the ring, and seconds
        of the ring / seconds of the plan.
    title : str
    """

    gains: dict[str, list[tuple[float, float]]]
    title: str


def read_crossover(args: argparse.Namespace) -> Crossover:
    """Read the files */*.h5 of a folder, and the profiles beside them.

    Raises
    ------
    ValueError
        If there is no file, no profile beside one, or a file has no ring.
    """
    gains: dict[str, list[tuple[float, float]]] = {}
    title = ""
    for path in Path(args.results).glob("*/*.h5"):
        plans = _best(read_measured(path), lambda x: x.seconds)
        best = {name: x for name, of_ranks in plans.items() for x in of_ranks.values()}
        if (ring := best.pop("ring", None)) is None:
            raise ValueError(f"{path} has no ring")
        link = read_machine(path.with_suffix(".toml")).links(ring.config["ranks"])[1]
        ratio = ring.parts["compute"] / (ring.received / link.bandwidth)
        for name, x in best.items():
            gains.setdefault(name, []).append((ratio, ring.seconds / x.seconds))
        title = (
            f"{workload_title(ring.config, ring.config['seqlen'])}, {ring.config['ranks']} ranks"
        )
    if not gains:
        raise ValueError(f"{args.results} has no file */*.h5")
    return Crossover({name: sorted(x) for name, x in gains.items()}, title)


def draw_crossover(plt, crossover: Crossover):
    """Draw how much faster than the ring each family is, by the ratio."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.5 * WIDTH))
    for name, points in crossover.gains.items():
        axes.plot(*zip(*points), linewidth=0.5, label=name, **style(name))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="time of computing / time of the ring's transfers")
    axes.set_ylabel("time of the ring / time of the plan")
    axes.grid(axis="y", linewidth=0.3)
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis, range(1, 7))
    return finish(figure, crossover.title)


# Kernels.

# CPUs of which /proc/cpuinfo has only numbers.
CPUS = {"EPYC (family 25, model 1)": "Zen 3", "EPYC (family 25, model 17)": "Zen 4"}


def draw_kernels(plt, entries: Mapping[str, Mapping]):
    """Draw the speed of each implementation, by mask and phase, with a panel for each run."""
    from matplotlib.ticker import EngFormatter

    unit = EngFormatter(places=1)
    runs = {name: calls for name, x in entries.items() if (calls := kernel_speeds(x))}
    if not runs:
        raise ValueError("the file has no speed of a kernel")
    of_all = dict.fromkeys(y for calls in runs.values() for x in calls.values() for y in x)
    styles = dict(zip(of_all, zip(cycle(COLOURS[::-1]), cycle("vos^Dp"))))
    columns, most = min(2, len(runs)), max(map(len, runs.values()))
    lines = -(-len(runs) // columns)
    size = WIDTH, 0.5 + lines * (0.6 + 0.15 * most)
    figure, panels = plt.subplots(lines, columns, squeeze=False, figsize=size)
    for axes, (run, calls) in zip(panels.flat, runs.items()):
        for y, speeds in enumerate(calls.values()):
            axes.axhline(y, color="#DDDDDD", linewidth=0.5, zorder=0)
            for name, speed in speeds.items():
                colour, marker = styles[name]
                axes.plot(1e12 * speed, y, marker, color=colour, fillstyle="none", label=name)
            best = 1e12 * max(x for name, x in speeds.items() if name != "product")
            axes.annotate(f"   {unit(best)}", (best, y), va="center")
        axes.set_yticks(range(len(calls)), [x.replace("/", " ") for x in calls])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.35e12 * max(max(x.values()) for x in calls.values()))
        axes.set_xlabel("FLOP/s of visible pairs")
        axes.xaxis.set_major_formatter(EngFormatter())
        for numbers, name in CPUS.items():
            run = run.replace(numbers, name)
        axes.set_title(run)
    for axes in panels.flat[len(runs) :]:
        axes.remove()
    title = "speed of attention: seqlen x nheads x headdim, mask, pass"
    return finish(figure, f"{title}; the fastest has its number")


# A kind of file: how to read it, and how to draw each of its figures.
FIGURES = {"scaling": draw_scaling, "phases": draw_phases, "bytes": draw_bytes,
           "model": draw_model}  # fmt: skip
FILE_KINDS: list[tuple[Callable, dict[str, Callable], str]] = [
    (read_runs, FIGURES, "bench"),
    (
        lambda args: read_file(args.results, BENCHMARK_SCHEMA)["figures"],
        {"kernels": draw_kernels},
        "bench kernels",
    ),
    (read_crossover, {"crossover": draw_crossover}, "jobs/run.py study"),
]
OTHERS = [name for _, figures, _ in FILE_KINDS[1:] for name in figures]
