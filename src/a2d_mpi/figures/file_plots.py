"""Figures of files of one thing: kernels, a training, a trace, computing over transfers; no MPI.

The last one says when 2-D attention matters.  The folder crossover of `jobs/run.py study` has one
workload on emulated clusters whose links differ, with a profile beside each file of results.  The
same plans on real machines are simulated for many lengths of the sequence.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.results import kernel_speeds, read_measured
from a2d_mpi.experiments.trace import COMMUNICATION
from a2d_mpi.figures.pictures import (
    COLOURS,
    WIDTH,
    finish,
    in_short,
    plain_ticks,
    style,
    timeline,
)
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning.model import slowest_seconds
from a2d_mpi.planning.planner import best_candidate, candidate
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload

# CPUs of which /proc/cpuinfo has only numbers.
CPUS = {"EPYC (family 25, model 1)": "Zen 3", "EPYC (family 25, model 17)": "Zen 4"}
SMOOTH = 50  # steps whose mean is drawn
_SHOWN = ("compute", "merge", "wait")  # categories of slices of a trace

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


def draw_kernels(plt, entries: Mapping[str, Mapping]):
    """Draw the speed of each implementation, by mask and phase, with a panel for each run."""
    from matplotlib.ticker import EngFormatter

    unit = EngFormatter(places=1)
    runs = {name: kernel_speeds(x) for name, x in entries.items()}
    runs = {name: x for name, x in runs.items() if x}
    if not runs:
        raise ValueError("the file has no speed of a kernel")
    of_all = dict.fromkeys(y for calls in runs.values() for x in calls.values() for y in x)
    styles = dict(zip(of_all, zip(cycle(COLOURS[::-1]), cycle("vos^Dp"))))
    columns = min(2, len(runs))
    most = max(map(len, runs.values()))
    figure, panels = plt.subplots(
        -(-len(runs) // columns), columns, squeeze=False,
        figsize=(WIDTH, 0.5 + -(-len(runs) // columns) * (0.6 + 0.15 * most)),
    )  # fmt: skip
    for axes, (run, calls) in zip(panels.flat, runs.items()):
        for y, speeds in enumerate(calls.values()):
            axes.axhline(y, color="#DDDDDD", linewidth=0.5, zorder=0)
            for name, speed in speeds.items():
                colour, marker = styles[name]
                axes.plot(1e12 * speed, y, marker, color=colour, fillstyle="none", label=name)
            best = 1e12 * max(speeds.values())
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
    return finish(
        figure,
        "speed of attention: seqlen x nheads x headdim, mask, pass; the fastest has its number",
    )


def draw_losses(plt, run: Mapping):
    """Draw the loss by tokens, beside the text's unigram entropy."""
    seqlen, steps = int(run["config"]["seqlen"]), len(run["loss"])
    if not steps:
        raise ValueError("the run has no step")
    window = min(SMOOTH, steps)
    mean = np.convolve(run["loss"], np.ones(window) / window, "valid")
    figure, axes = plt.subplots(figsize=(WIDTH, 0.45 * WIDTH))
    tokens = np.arange(1, steps + 1) * seqlen / 1e3
    axes.plot(tokens, run["loss"], color="#56B4E9", linewidth=0.3, alpha=0.6, label="each step")
    axes.plot(tokens[window - 1 :], mean, color="#0072B2", label=f"mean of {window} steps")
    entropy = run["text"]["unigram_entropy"]
    axes.axhline(entropy, color="black", linestyle="--", linewidth=0.8,
                 label=f"unigram entropy, {entropy:.2f}")  # fmt: skip
    if run["held_out"]:
        held = run["held_out"]["loss"]
        axes.plot(tokens[-1:], [held], "D", color="#D55E00", label=f"held-out text, {held:.2f}")
    axes.set(xlim=0, ylim=(0, 1.05 * run["loss"].max()), xlabel="thousand tokens")
    axes.set_ylabel("loss, nats per byte")
    bits = axes.secondary_yaxis(
        "right", functions=(lambda x: x / math.log(2), lambda x: x * math.log(2))
    )
    bits.set_ylabel("bits per byte")
    return finish(figure, f"{run['text']['name']}, {steps} steps of {seqlen} tokens")


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
