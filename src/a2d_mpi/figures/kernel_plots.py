"""The figure of files of bench_kernel.py; no MPI import."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from a2d_mpi.experiments.benchmark import Entry, kernel_speeds

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999")


def draw_kernels(plt, found: Mapping[str, Entry], width: float):
    """Bars of the speed of each implementation, by mask and phase; a panel for each run."""
    runs = {name: kernel_speeds(x) for name, x in found.items()}
    runs = {name: x for name, x in runs.items() if x}
    if not runs:
        raise ValueError("the file has no speed of a kernel")
    of_all = {name: None for speeds in runs.values() for x in speeds.values() for name in x}
    colours = dict(zip(of_all, cycle(COLOURS)))
    heights = [sum(map(len, speeds.values())) for speeds in runs.values()]
    figure, panels = plt.subplots(
        len(runs),
        1,
        squeeze=False,
        height_ratios=heights,
        figsize=(width, 0.3 * width * len(runs) + 0.07 * sum(heights)),
    )
    for axes, (run, speeds) in zip(panels[:, 0], runs.items(), strict=True):
        fast = max(max(x.values()) for x in speeds.values()) >= 1
        for y, of_group in enumerate(speeds.values()):
            each = 0.8 / len(of_group)
            for i, (name, speed) in enumerate(of_group.items()):
                at, length = y - 0.4 + (i + 0.5) * each, speed if fast else 1e3 * speed
                axes.barh(at, length, each, color=colours[name], label=name if y == 0 else None)
                axes.annotate(f" {length:.3g}", (length, at), va="center", fontsize=3.5)
        axes.set_yticks(range(len(speeds)), [x.replace("/", " ") for x in speeds], fontsize=5)
        axes.invert_yaxis()
        axes.set_xlabel("TFLOP/s" if fast else "GFLOP/s")
        axes.set_title(run, fontsize=6)
    return figure, "Speed of attention, visible pairs"
