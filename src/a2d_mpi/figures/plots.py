"""The figures of `drivers/plot.py results`; no MPI import."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import cycle
from pathlib import Path

import numpy as np

from a2d_mpi.figures.pictures import (
    COLOURS,
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
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.results.hdf5 import BENCHMARK_SCHEMA, read_file
from a2d_mpi.results.tables import (
    FAMILIES,
    PARTS,
    Summary,
    family_of,
    kernel_speeds,
    plan_text,
    read_measured,
)


def plot(args: argparse.Namespace) -> int:
    """Draw the figure that is asked for; returns the exit code."""
    check_picture(args.output)
    save(FIGURES[args.what](pyplot(**SETTINGS), args), args.output)
    return 0


def _chosen(args: argparse.Namespace) -> list[Summary]:
    """Read the runs that --workload and --ranks choose, the fastest first."""
    if not (runs := read_measured(args.results)):
        raise ValueError(f"{args.results} has no result to plot")
    names = Counter(x.config["workload"] for x in runs)
    workload = args.workload or max(names, key=lambda x: (names[x], x))
    if workload not in names:
        raise ValueError(f"no workload {workload!r}: {', '.join(sorted(names))}")
    shown = [x for x in runs if x.config["workload"] == workload]
    ranks = args.ranks or max(x.config["ranks"] for x in shown)
    shown = [x for x in shown if x.config["ranks"] == ranks]
    if not shown:
        raise ValueError(f"{workload} was not run on {ranks} ranks")
    return sorted(shown, key=lambda x: x.seconds)


def draw_phases(plt, args: argparse.Namespace):
    """Draw the times of the plans of one workload, and the shares of their parts."""
    shown = _chosen(args)
    config, best, names = shown[0].config, 1e3 * shown[0].seconds, []
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
    times.set_xlabel(f"slowest of {config['ranks']} ranks, ms (ratio to the fastest plan)")
    shares.set(xlim=(0, 100), xlabel="% of the time of the slowest rank")
    return finish(figure, workload_title(config, config["seqlen"]))


def draw_crossover(plt, args: argparse.Namespace):
    """Draw how much faster than the ring the best plan of each family is, by the ratio.

    The folder crossover of ``jobs/run.py study`` has one workload on emulated clusters whose links
    differ: files */*.h5, with a profile beside each.  The ratio is that of computing to transfers
    of the ring.

    Raises
    ------
    ValueError
        If there is no file, or no ring in one.
    """
    gains: dict[str, list[tuple[float, float]]] = {}  # by family: ratio and gain
    for path in Path(args.results).glob("*/*.h5"):
        best: dict[str, Summary] = {}
        for x in sorted(read_measured(path), key=lambda x: x.seconds):
            best.setdefault(family_of(x.config), x)
        if (ring := best.pop("ring", None)) is None:
            raise ValueError(f"{path} has no ring")
        config = ring.config
        link = read_machine(path.with_suffix(".toml")).links(config["ranks"])[1]
        ratio = ring.parts["compute"] / (ring.received / link.bandwidth)
        for name, x in best.items():
            gains.setdefault(name, []).append((ratio, ring.seconds / x.seconds))
    if not gains:
        raise ValueError(f"{args.results} has no file */*.h5")
    figure, axes = plt.subplots(figsize=(WIDTH, 0.5 * WIDTH))
    for name in sorted(gains, key=FAMILIES.index):
        axes.plot(*zip(*sorted(gains[name])), linewidth=0.5, label=name, **style(name))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="time of computing / time of the ring's transfers")
    axes.set_ylabel("time of the ring / time of the plan")
    axes.grid(axis="y", linewidth=0.3)
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis, range(1, 7))
    title = workload_title(config, config["seqlen"])
    return finish(figure, f"{title}, {config['ranks']} ranks")


# CPUs of which /proc/cpuinfo has only numbers.
CPUS = {"EPYC (family 25, model 1)": "Zen 3", "EPYC (family 25, model 17)": "Zen 4"}


def draw_kernels(plt, args: argparse.Namespace):
    """Draw the speed of each implementation, by mask and phase, with a panel for each run."""
    from matplotlib.ticker import EngFormatter

    entries = read_file(args.results, BENCHMARK_SCHEMA)["figures"]
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


FIGURES = {"phases": draw_phases, "kernels": draw_kernels, "crossover": draw_crossover}
