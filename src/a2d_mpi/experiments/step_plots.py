"""Files of drivers/bench_train.py, and their pictures; no MPI import."""

from __future__ import annotations

import os
from dataclasses import dataclass

import h5py
import numpy as np

from a2d_mpi.experiments.hdf5 import arrays, needed, plain, reading
from a2d_mpi.experiments.pictures import FILLS
from a2d_mpi.gpt.cost import PARTS

SCHEMA = ("a2d_mpi training steps", 1)
# Of the parts of a step: colour and hatch.
_FILLS = {"attention": FILLS["compute"], "wait": FILLS["wait"], "gradients": ("#CC79A7", "xx"),
          "adam": FILLS["merge"], "other": FILLS["other"]}  # fmt: skip


@dataclass
class Steps:
    """Training steps by one plan.

    Attributes
    ----------
    attributes : dict
        Plan, model, checks, predictions; see `a2d_mpi.experiments.bench_train`.
    arrays : dict of str to array
    """

    attributes: dict[str, object]
    arrays: dict[str, np.ndarray]

    @property
    def plan(self) -> str:
        """Its name."""
        a = self.attributes
        return f"{a['method']} {a['rows']}x{a['cols']}x{a['heads']}"

    @property
    def seconds(self) -> float:
        """Of the slowest rank, median of all trials."""
        return float(np.median(self.arrays["seconds"].sum(axis=2).max(axis=1)))

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part of the slowest rank, medians."""
        seconds = self.arrays["seconds"]  # (trials, ranks, parts)
        slowest = seconds.sum(axis=2).argmax(axis=1)
        of_slowest = seconds[np.arange(len(seconds)), slowest]
        return dict(zip(PARTS, np.median(of_slowest, axis=0).tolist()))

    @property
    def operator(self) -> float:
        """Seconds of attention alone, once forward and backward; median."""
        return float(np.median(self.arrays["operator"].max(axis=1)))

    @property
    def predicted(self) -> dict[str, float]:
        """Seconds by part; empty without a profile."""
        found = {x: self.attributes.get(f"predicted/{x}") for x in PARTS}
        return {} if None in found.values() else found


def read_steps(path: str | os.PathLike[str]) -> list[Steps]:
    """Read a file; OSError or ValueError, with one line, if it is none."""
    with reading(path, SCHEMA) as file:
        runs = needed(file, "runs").values()
        return [Steps(plain(x.attrs), arrays(x)) for x in runs if isinstance(x, h5py.Group)]


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
    return figure, axes, title


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
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(everyone, [str(x) for x in everyone])
    axes.minorticks_off()
    axes.set(xlabel="ranks", ylabel="MB of a rank")
    a = runs[0].attributes
    title = f"{a['layers']} layers of width {a['width']}, {a['seqlen']} tokens"
    return figure, axes, title


DRAWN = {"steps": draw_steps, "activations": draw_activations}
