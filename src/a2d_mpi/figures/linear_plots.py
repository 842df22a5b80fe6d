"""The figure of a file of `drivers/bench.py linear`; no MPI import."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import LINEAR_SCHEMA
from a2d_mpi.figures.pictures import WIDTH, finish, in_short, plain_ticks, style

# Plans of linear attention.  The other plans are methods of exact attention.
LINEAR = {"lasp2": "linear, LASP-2", "lasp": "linear, LASP's ring"}


def read_lengths(path: str | os.PathLike[str]) -> dict[str, dict[int, Mapping]]:
    """Read the runs of a file, by plan and number of tokens.

    Raises
    ------
    OSError, ValueError
        If it cannot be read, or is another kind of file; one line.
    """
    plans = read_file(path, LINEAR_SCHEMA)["runs"]
    return {plan: {int(n): x for n, x in runs.items()} for plan, runs in plans.items()}


def draw_lengths(plt, plans: Mapping[str, Mapping[int, Mapping]]):
    """Draw seconds of the slowest rank by number of tokens, medians of all trials."""
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 0.4 * WIDTH), sharey=True)
    for phase, (axes, name) in enumerate(zip(panels, ("forward", "backward"))):
        for plan, runs in plans.items():
            lengths = sorted(runs)
            seconds = [np.median(runs[n]["seconds"][..., phase].max(axis=1))
                       for n in lengths]  # fmt: skip
            label = LINEAR.get(plan, f"exact, {plan}")
            axes.plot(lengths, seconds, label=label, **style(plan))
        axes.set(xscale="log", yscale="log", title=name, xlabel="tokens")
        axes.minorticks_off()
        axes.set_xticks(lengths, [in_short(n) for n in lengths])
        axes.grid(axis="y", linewidth=0.3)
        plain_ticks(axes.yaxis)
    panels[0].set_ylabel("time, s")
    ranks = next(iter(plans.values()))[lengths[0]]["sent"].shape[0]
    return finish(figure, f"slowest of {ranks} ranks")
