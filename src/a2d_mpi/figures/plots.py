"""The figures of `drivers/plot.py results`; no MPI import."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from a2d_mpi.core.layout import Layout
from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.plan import read_summaries
from a2d_mpi.experiments.results import (
    BENCHMARK_SCHEMA,
    FAMILIES,
    PARTS,
    TRAINING_SCHEMA,
    Summary,
    kernel_speeds,
    read_measured,
)
from a2d_mpi.experiments.trace import COMMUNICATION, read_trace
from a2d_mpi.figures.pictures import (
    COLOURS,
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
    timeline,
    workload_title,
)
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning.model import slowest_seconds
from a2d_mpi.planning.planner import best_candidate, candidate, duration
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload


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


def _usual(workloads: Sequence, plans: Sequence[Summary]):
    """Return the workload that ran on the most numbers of ranks, and then with the most plans.

    `workloads` has the workload of each plan.
    """
    entries = Counter(workloads)
    ranks = Counter(x for x, _ in {(x, y.ranks) for x, y in zip(workloads, plans)})
    return max(entries, key=lambda x: (ranks[x], entries[x], x))


def _order(family: str) -> tuple[int, str]:
    """Sort families as in `FAMILIES`; a user's methods come last."""
    return (FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)), family


def _best(
    plans: Iterable[Summary], place: Callable[[Summary], Any], key: Callable[[Summary], float]
) -> dict[str, dict[Any, Summary]]:
    """Choose the plan of least `key` for each family and place, both in order."""
    best: dict[str, dict[Any, Summary]] = {}
    for x in sorted(plans, key=place):
        of_family = best.setdefault(x.family, {})
        of_family[place(x)] = min(of_family.get(place(x), x), x, key=key)
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
        plans = [x for x in self.of_workload if x.overlap] or self.of_workload
        return _best((x for x in plans if x.ranks >= fewest), lambda x: x.ranks, key)

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
    plans = runs.best(lambda x: x.seconds)
    each = (x for best in plans.values() for x in best.values())
    first = min(each, key=lambda x: (x.ranks, x.seconds))
    ideal = 100 * first.seconds * first.ranks  # of one rank, times 100 %
    speeds = {
        name: {ranks: ideal / ranks / x.seconds for ranks, x in best.items()}
        for name, best in plans.items()
    }
    title = f"100 %: {duration(first.seconds)} on {first.ranks} ranks"
    return finish(_by_ranks(plt, {title: speeds}, "speed, % of ideal"), runs.title)


def draw_phases(plt, runs: Runs):
    """Draw the times of the plans of one workload, and the shares of their parts."""
    shown = [x for x in runs.of_workload if x.ranks == runs.ranks]
    shown.sort(key=lambda x: x.seconds)
    best, names = 1e3 * shown[0].seconds, []
    figure, (times, shares) = plt.subplots(
        1, 2, sharey=True, figsize=(WIDTH, 0.8 + 0.17 * len(shown))
    )
    for y, x in enumerate(shown):
        ms, known = 1e3 * x.seconds, x.family.partition(" + ")[0]
        names.append(x.plan.removesuffix("@rcu") + f" ({known})" * (known != x.method))
        times.plot(ms, y, **style(x.family))
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
    bounds = {x.ranks: x.bound / 1e6 for x in each if x.bound > 0}
    for axes in figure.axes:
        axes.plot([x.ranks for x in each], [x.formula / 1e6 for x in each], "k_", markersize=9,
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
        families = {x.family for x in runs if (" + heads" in x.family) == heads}
        for name in sorted(families, key=_order):
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


# Simulations: how plans scale.

WORKLOAD = "mask", "nheads", "nheads_kv", "headdim", "dtype", "backward"


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
    panels: dict[str, list[Summary]] = {}
    for x in every:
        if [*workloads[x.name][:-1]] == usual:
            # An axis has the number of ranks, so the name has no number of nodes.
            panel = f"{nodes_of(x.config['machine'])}, {x.config['network']}"
            panels.setdefault(panel, []).append(x)
    place, seconds = lambda x: (x.ranks, x.config["seqlen"]), lambda x: x.seconds
    plans = {name: _best(of_panel, place, seconds) for name, of_panel in panels.items()}
    title = workload_title(dict(zip(WORKLOAD, usual)))
    return Scale(plans, seqlen, f"simulated: {title}")


def draw_slopes(plt, scale: Scale):
    """Draw time by number of ranks, and at the end of each line the fitted power of the ranks."""
    times: dict[str, dict[str, dict[int, float]]] = {}
    for panel, families in scale.plans.items():
        for name, best in families.items():
            of_length = {ranks: x for (ranks, tokens), x in best.items() if tokens == scale.seqlen}
            if of_length:
                ms = {ranks: 1e3 * x.seconds for ranks, x in of_length.items()}
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


# When 2-D attention matters.  The folder crossover of `jobs/run.py study` has one workload on
# emulated clusters whose links differ, with a profile beside each file of results.  The same plans
# on real machines are simulated for many lengths of the sequence.

RANKS = 16
PICK = "the planner's pick"
# The method and the shape of each plan, and its look; the ring is the line at 1.
PLANS = {
    "ring": ("ring", Layout(16, 1)),
    "square grid 4 x 4": ("attention2d", Layout(4, 4)),
    "USP, ring of 4 x 4 head ranks": ("ring", Layout(4, 1, 4)),
}
STYLES = {
    "square grid 4 x 4": style("attention2d"),
    "USP, ring of 4 x 4 head ranks": style("ring + heads"),
    PICK: {"color": "black", "marker": "*"},
}
MACHINES = {"H100": ("h100-64x1", "-"), "A100": ("a100-4-1nic", "--")}  # one NIC for each GPU
# Below 32K tokens kernels wait for their launches, and the ratio rises again.
TOKENS = [1 << i for i in range(15, 23)]
MARKED = {1 << i for i in (15, 17, 18, 20, 22)}

# The ratio of computing to the transfers of the ring, and the seconds of each plan.
Point = tuple[float, dict[str, float]]


def read_crossover(args: argparse.Namespace) -> dict[str, list[Point]]:
    """Collect the measured and the simulated points, by their source.

    Raises
    ------
    ValueError
        If there is no file of results, no profile beside one, or one lacks a plan.
    """
    sources: dict[str, list[Point]] = {"measured": []}
    for path in sorted(Path(args.results).glob("*/*.h5")):
        bandwidth = read_machine(path.with_suffix(".toml")).links(RANKS)[1].bandwidth
        results = read_measured(path)
        runs = {(x.method, x.layout.shape): x for x in reversed(results)}
        plans = {label: runs.get((x, y.shape)) for label, (x, y) in PLANS.items()}
        plans[PICK] = next((x for x in results if x.picked), None)
        for label, x in plans.items():
            if x is None:
                raise ValueError(f"{path} has no {label}")
        ratio = plans["ring"].parts["compute"] / (plans["ring"].received / bandwidth)
        sources["measured"].append((ratio, {label: x.seconds for label, x in plans.items()}))
    if not sources["measured"]:
        raise ValueError(f"{args.results} has no file */*.h5")
    sources["measured"].sort(key=lambda point: point[0])
    for name, (profile, _) in MACHINES.items():
        path = Path(__file__).parents[3] / f"data/machines/{profile}.toml"
        machine = read_machine(path).with_ranks_per_node(1)
        sources[name] = []
        for tokens in TOKENS:  # 8 heads of 128, causal, with gradients
            work = Workload(tokens, 8, 128, mask=Causal(), backward=True)
            plans = {label: candidate(machine, *x, work) for label, x in PLANS.items()}
            plans[PICK] = best_candidate(machine, RANKS, work)
            transfers = plans["ring"].received / machine.links(RANKS)[1].bandwidth
            seconds = {label: slowest_seconds(x.phases) for label, x in plans.items()}
            sources[name].append((plans["ring"].split["compute"] / transfers, seconds))
    return sources


def draw_crossover(plt, sources: dict[str, list[Point]]):
    """Draw how much faster than the ring each plan is, by the ratio."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.55 * WIDTH))
    for plan, look in STYLES.items():
        for source, points in sources.items():
            gains = zip(*((ratio, x["ring"] / x[plan]) for ratio, x in points))
            if source == "measured":
                axes.plot(*gains, linestyle=":", linewidth=0.5, markersize=5, label=plan, **look)
            else:
                axes.plot(*gains, MACHINES[source][1], color=look["color"])
    for name, (_, line) in MACHINES.items():
        axes.plot([], [], line, color="#777777", label=f"simulated, {name}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="time of computing / time of the ring's transfers")
    axes.set_ylabel("time of the ring / time of the plan")
    axes.grid(axis="y", linewidth=0.3)
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis, range(1, 7))
    for place, name in enumerate(MACHINES):  # where each machine stands
        tops = axes.secondary_xaxis(1.02 + 0.2 * place)
        marks = {x: in_short(n) for n, (x, _) in zip(TOKENS, sources[name]) if n in MARKED}
        tops.set_xticks(list(marks), list(marks.values()))
        tops.minorticks_off()
        tops.set_xlabel(f"tokens on 16 {name}", labelpad=2)
    return finish(figure, "causal, with gradients, 16 nodes; points: measured with 8K tokens")


# Kernels, a training, a trace.

# CPUs of which /proc/cpuinfo has only numbers.
CPUS = {"EPYC (family 25, model 1)": "Zen 3", "EPYC (family 25, model 17)": "Zen 4"}
SMOOTH = 50  # steps whose mean is drawn
_SHOWN = ("compute", "merge", "wait")  # categories of slices of a trace


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


def draw_losses(plt, run: Mapping):
    """Draw the loss by tokens, beside the text's unigram entropy."""
    steps = len(run["loss"])
    if not steps:
        raise ValueError("the run has no step")
    window = min(SMOOTH, steps)
    mean = np.convolve(run["loss"], np.ones(window) / window, "valid")
    figure, axes = plt.subplots(figsize=(WIDTH, 0.45 * WIDTH))
    of_step = int(run["config"]["seqlen"]) * int(run["config"]["accumulate"])
    tokens = np.arange(1, steps + 1) * of_step / 1e3
    axes.plot(tokens, run["loss"], color="#56B4E9", linewidth=0.3, alpha=0.6, label="each step")
    axes.plot(tokens[window - 1 :], mean, color="#0072B2", label=f"mean of {window} steps")
    entropy = run["text"]["unigram_entropy"]
    axes.axhline(entropy, color="black", linestyle="--", linewidth=0.8,
                 label=f"unigram entropy, {entropy:.2f}")  # fmt: skip
    if run["held_out"]:
        held = run["held_out"]["loss"]
        axes.plot(tokens[-1:], [held], "D", color="#D55E00", label=f"held-out text, {held:.2f}")
    axes.set(xlim=0, ylim=(0, 1.05 * run["loss"].max()), xlabel="thousand tokens")
    axes.set_ylabel("loss, nats per token")
    return finish(figure, f"{run['text']['name']}, {steps} steps of {of_step} tokens")


def draw_trace(plt, events: list[dict]):
    """Draw what every rank computes (upper bar) and waits for (lower bar), and all messages."""
    rows = {x["tid"]: x["pid"] + 0.4 * (x["args"]["name"] == COMMUNICATION)
            for x in events if x["name"] == "thread_name"}  # fmt: skip
    calls = [x for x in events if x.get("cat") == "total"]
    if not calls:
        raise ValueError("the trace has no calls")
    ranks = 1 + max(x["pid"] for x in events)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + min(0.35 * ranks, 5.0)))
    for tid, y in rows.items():
        spans = [(x["cat"], x["ts"] / 1e3, (x["ts"] + x["dur"]) / 1e3) for x in events
                 if x.get("cat") in _SHOWN and x["tid"] == tid]  # fmt: skip
        timeline(axes, y - 0.2, spans, 0.38)
    begins = {x["id"]: x for x in events if x["ph"] == "s"}
    for end in (x for x in events if x["ph"] == "f"):
        both = begins[end["id"]], end
        axes.plot([x["ts"] / 1e3 for x in both], [rows[x["tid"]] - 0.2 for x in both],
                  marker=".", markevery=[1], markersize=3, color="black", linewidth=0.5,
                  alpha=0.6, label="message")  # fmt: skip
    axes.set(xlabel="time, ms", ylabel="rank", ylim=(ranks - 0.4, -0.6))
    axes.set_xlim(min(x["ts"] for x in calls) / 1e3, max(x["ts"] + x["dur"] for x in calls) / 1e3)
    axes.yaxis.set_major_locator(plt.MaxNLocator(8, integer=True))
    names = ", ".join(dict.fromkeys(x["name"] for x in calls))
    return finish(figure, f"{names}, {ranks} ranks")


# A kind of file: how to read it, and how to draw each of its figures.
FIGURES = {"scaling": draw_scaling, "phases": draw_phases, "bytes": draw_bytes,
           "model": draw_model}  # fmt: skip
AT_SCALE = {"slopes": draw_slopes, "winners": draw_winners}
FILE_KINDS: list[tuple[Callable, dict[str, Callable], str]] = [
    (read_runs, FIGURES, "bench"),
    (lambda args: read_file(args.results, TRAINING_SCHEMA), {"training": draw_losses}, "train"),
    (
        lambda args: read_file(args.results, BENCHMARK_SCHEMA)["figures"],
        {"kernels": draw_kernels},
        "bench kernels",
    ),
    (lambda args: read_scale(args.results, args.workload), AT_SCALE, "plan simulate"),
    (read_crossover, {"crossover": draw_crossover}, "jobs/run.py study"),
    (lambda args: read_trace(args.results), {"trace": draw_trace}, "attention --trace"),
]
OTHERS = [name for _, figures, _ in FILE_KINDS[1:] for name in figures]
