"""Figures of files of one thing: speeds of kernels, a training, a trace; no MPI import."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle

import numpy as np

from a2d_mpi.experiments.results import kernel_speeds
from a2d_mpi.experiments.trace import COMMUNICATION
from a2d_mpi.figures.pictures import COLOURS, WIDTH, finish, timeline

# CPUs of which /proc/cpuinfo has only numbers.
CPUS = {"EPYC (family 25, model 1)": "Zen 3", "EPYC (family 25, model 17)": "Zen 4"}
NAME = 40  # characters of a file of a training that are shown
SMOOTH = 50  # steps whose mean is drawn
_SHOWN = ("compute", "merge", "wait")  # categories of slices of a trace


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
    name = str(run["text"]["name"])
    name = name if len(name) <= NAME else name[: NAME - 3] + "..."
    return finish(figure, f"{name}, {steps} steps of {seqlen} tokens")


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
