"""The figure of files of bench.py kernels; no MPI import."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from a2d_mpi.experiments.summary import kernel_speeds
from a2d_mpi.figures.pictures import COLOURS, WIDTH, finish

# CPUs of which /proc/cpuinfo has only numbers.
CPUS = {"EPYC (family 25, model 1)": "Zen 3", "EPYC (family 25, model 17)": "Zen 4"}


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
