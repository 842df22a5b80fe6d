"""Figures of bench_gpu.py and bench_tile.py in a benchmark file, and pictures; no MPI import.

::

    /figures/<name>        attributes: origin, options, ranks, ...; tflop/<call>: TFLOP of a call
        <call>             (trials,) seconds of the slowest rank

The rest of the file is as `a2d_mpi.experiments.benchmark` has it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from a2d_mpi.experiments.benchmark import SCHEMA, add_results
from a2d_mpi.experiments.hdf5 import arrays, needed, plain, reading
from a2d_mpi.experiments.results import new_file, set_attributes


@dataclass
class Figures:
    """The figures of one benchmark.

    Attributes
    ----------
    attributes : dict
    seconds : dict of str to (trials,) float64
    """

    attributes: dict[str, object]
    seconds: dict[str, np.ndarray]


def add_figures(
    path: str | os.PathLike[str],
    name: str,
    attributes: Mapping[str, object],
    seconds: Mapping[str, np.ndarray],
) -> None:
    """Add the figures of one benchmark to a file, in place of earlier ones, or make the file.

    Raises
    ------
    OSError, ValueError
        If it cannot be written, or is no benchmark file.
    """
    if os.path.exists(path):
        with reading(path, SCHEMA):
            pass
    else:
        add_results(path, {}, {})
    with new_file(path, extend=True) as file:
        if f"figures/{name}" in file:
            del file[f"figures/{name}"]
        group = file.create_group(f"figures/{name}")
        set_attributes(group, attributes)
        for call, x in seconds.items():
            group.create_dataset(call, data=x)


def read_figures(path: str | os.PathLike[str], name: str) -> Figures:
    """Read the figures of one benchmark; OSError or ValueError, with one line, if it has none."""
    return read_all(path, name)[name]


def read_all(path: str | os.PathLike[str], *names: str) -> dict[str, Figures]:
    """Read the figures of these benchmarks, or of all; raises what `read_figures` does."""
    with reading(path, SCHEMA) as file:
        groups = {x: needed(file, f"figures/{x}") for x in names or needed(file, "figures")}
        return {name: Figures(plain(x.attrs), arrays(x)) for name, x in groups.items()}


def draw_kernels(plt, found: Figures, width: float):
    """Bars of TFLOP/s by mask, phase and implementation."""
    a = found.attributes
    calls = [tuple(x.split("/")) for x in found.seconds]  # (mask, phase, implementation)
    groups = sorted({x[:2] for x in calls}, reverse=True)  # full, forward first
    names = sorted({x[2] for x in calls}, key=lambda x: (x != "a2d_mpi", x))
    figure, axes = plt.subplots(figsize=(width, 0.75 * width))
    each = 0.8 / len(names)
    colours = ("#0072B2", "#D55E00", "#E69F00", "#999999")
    for i, name in enumerate(names):
        label = name
        for x, group in enumerate(groups):
            key = "/".join((*group, name))
            if key not in found.seconds:
                continue  # a backend that does not take it
            rate = a[f"tflop/{'/'.join(group)}"] / np.median(found.seconds[key])
            at = x + (i - (len(names) - 1) / 2) * each
            axes.bar(at, rate, each, color=colours[i % len(colours)], label=label)
            axes.annotate(f"{rate:.3g}", (at, rate), ha="center", va="bottom", fontsize=5)
            label = None
    axes.set_xticks(range(len(groups)), ["\n".join(x) for x in groups])
    axes.margins(y=0.12)
    axes.set_ylabel("TFLOP/s")
    heads = f"{a['nheads']} heads x {a['headdim']}"
    return figure, axes, f"{a['device']}, {a['seqlen']} tokens, {heads}, {a['dtype']}"


def draw_tiles(plt, found: Mapping[str, Figures], width: float):
    """Speed of our kernels over torch's, by shape, mask and phase; a panel for each benchmark."""
    of = [sorted({x.rsplit("/", 1)[0] for x in y.seconds}, key=_size) for y in found.values()]
    figure, panels = plt.subplots(
        *(len(found), 1),
        squeeze=False,
        sharex=True,
        height_ratios=[len(groups) for groups in of],
        figsize=(width, 0.25 * width + 0.17 * sum(map(len, of))),
    )
    for axes, groups, (name, figures) in zip(panels[:, 0], of, found.items(), strict=True):
        for i, kernel in enumerate(("numpy", "numba")):
            ratios = {
                y: float(np.median(figures.seconds[f"{group}/torch"] / ours))
                for y, group in enumerate(groups)
                if (ours := figures.seconds.get(f"{group}/{kernel}")) is not None
            }
            at, colour = [y + 0.4 * i - 0.2 for y in ratios], ("#E69F00", "#0072B2")[i]
            axes.barh(at, list(ratios.values()), 0.4, color=colour, label=kernel)
        axes.axvline(1, color="black", linewidth=0.6)
        axes.set_yticks(range(len(groups)), [x.replace("/", " ") for x in groups], fontsize=5)
        axes.invert_yaxis()
        axes.set_title(name, fontsize=6)
    panels[-1, 0].set_xlabel("torch's time / ours")
    return figure, panels[0, 0], "One core, float32, against torch"


def _size(group: str) -> tuple[int, str, str]:
    """Order of groups like "16x16x16/full/forward": by size."""
    shape, rest = group.split("/", 1)
    seqlen, nheads, headdim = map(int, shape.split("x"))
    return seqlen**2 * nheads * headdim, shape, rest
