"""The figures of a file of `drivers/bench_gpt.py train`; no MPI import."""

from __future__ import annotations

import numpy as np

from a2d_mpi.experiments.gpt_files import Steps
from a2d_mpi.figures.pictures import FILLS, log_ranks

# Of the parts of a step: colour and hatch.
_FILLS = {"attention": FILLS["compute"], "wait": FILLS["wait"], "gradients": ("#CC79A7", "xx"),
          "adam": FILLS["merge"], "other": FILLS["other"]}  # fmt: skip


def draw_steps(plt, runs: list[Steps], width: float):
    """Bars of measured and predicted seconds by part, on the most ranks."""
    ranks = max(x.attributes["ranks"] for x in runs)
    shown = sorted((x for x in runs if x.attributes["ranks"] == ranks), key=lambda x: x.seconds)
    figure, axes = plt.subplots(figsize=(width, 0.35 * width + 0.3 * len(shown)))
    for y, run in enumerate(shown):
        for below, parts in ((0, run.parts), (0.4, run.predicted)):
            left = 0.0
            for part, seconds in parts.items():
                colour, hatch = _FILLS[part]
                axes.barh(y + below, seconds, 0.36, left, color=colour, hatch=hatch,
                          alpha=1 - 1.2 * below, edgecolor="white", linewidth=0.3,
                          label=part if y == below == 0 else None)  # fmt: skip
                left += seconds
    labels = [x.plan + ", recompute" * bool(x.attributes["recompute"]) for x in shown]
    axes.set_yticks(np.arange(len(shown)) + 0.2, labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel(f"s a step, slowest of {ranks} ranks (pale: predicted)")
    a = shown[0].attributes
    title = f"{a['layers']} layer, width {a['width']}, {a['mask']}, {a['seqlen']} tokens"
    return figure, title


def draw_activations(plt, runs: list[Steps], width: float):
    """Bytes of activations and of attention's buffers by number of ranks."""
    figure, axes = plt.subplots(figsize=(width, 0.75 * width))
    ways = {"activations": (False, "activations", "#0072B2", "o-"),
            "with --recompute": (True, "activations", "#D55E00", "s-"),
            "attention's buffers": (False, "buffers", "#999999", "^--")}  # fmt: skip
    everyone = sorted({x.attributes["ranks"] for x in runs})
    for label, (recompute, name, colour, style) in ways.items():
        known = {x.attributes["ranks"]: x.arrays[name].max() / 1e6
                 for x in runs if x.attributes["recompute"] == recompute}  # fmt: skip
        ranks = [x for x in sorted(known) if known[x]]
        axes.plot(ranks, [known[x] for x in ranks], style, color=colour, label=label)
        if name == "activations":
            first = ranks[0]
            axes.plot(ranks, [known[first] * first / x for x in ranks], ":", color=colour,
                      linewidth=0.8, label="1 / P" if not recompute else None)  # fmt: skip
    axes.set(yscale="log", ylabel="MB of a rank")
    log_ranks(axes, everyone)
    a = runs[0].attributes
    title = f"{a['layers']} layers of width {a['width']}, {a['seqlen']} tokens"
    return figure, title


DRAWN = {"steps": draw_steps, "activations": draw_activations}
