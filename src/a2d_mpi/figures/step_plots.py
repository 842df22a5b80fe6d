"""The figures of a file of `drivers/bench.py train`; no MPI import."""

from __future__ import annotations

import numpy as np

from a2d_mpi.experiments.summary import Steps
from a2d_mpi.figures.pictures import WIDTH, finish, log_ranks, plain_ticks, stacked


def draw_steps(plt, runs: list[Steps]):
    """Draw measured and predicted seconds by part, on the most ranks."""
    ranks = max(x["ranks"] for x in runs)
    shown = sorted((x for x in runs if x["ranks"] == ranks), key=lambda x: x.seconds)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.8 + 0.3 * len(shown)))
    heights = np.arange(len(shown))
    stacked(axes, heights, [x.parts for x in shown], height=0.36)
    for y, run in enumerate(shown):
        if run.predicted:
            stacked(axes, [y + 0.4], [run.predicted], height=0.36, alpha=0.5, label=None)
    labels = [x.plan + ", recompute" * bool(x["recompute"]) for x in shown]
    axes.set_yticks(heights + 0.2, labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds of a step, slowest of {ranks} ranks (pale: predicted)")
    a = shown[0]
    layers = f"{a['layers']} layer" + "s" * (a["layers"] > 1)
    title = f"{layers}, width {a['width']}, {a['mask']}, {a['seqlen']} tokens"
    return finish(figure, title)


def draw_activations(plt, runs: list[Steps]):
    """Draw the bytes of activations and of attention's buffers by number of ranks."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.4 * WIDTH))
    ways = {"activations": (False, "activations", "#0072B2", "o-"),
            "activations, --recompute": (True, "activations", "#D55E00", "s-"),
            "attention's buffers": (False, "buffers", "#777777", "^--")}  # fmt: skip
    for label, (recompute, name, colour, way) in ways.items():
        megabytes = {x["ranks"]: x[name].max() / 1e6
                     for x in runs if x["recompute"] == recompute}  # fmt: skip
        ranks = np.array([x for x in sorted(megabytes) if megabytes[x]])
        values = [megabytes[x] for x in ranks]
        axes.plot(ranks, values, way, color=colour, fillstyle="none", label=label)
        if name == "activations":
            ideal = values[0] * ranks[0] / ranks
            axes.plot(ranks, ideal, "k:", linewidth=1.5, label="1 / P")
    axes.set(yscale="log", ylabel="MB of the largest rank")
    plain_ticks(axes.yaxis)
    log_ranks(axes, {x["ranks"] for x in runs})
    a = runs[0]
    return finish(figure, f"{a['layers']} layers of width {a['width']}, {a['seqlen']} tokens")


DRAWN = {"steps": draw_steps, "activations": draw_activations}
