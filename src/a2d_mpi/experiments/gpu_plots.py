"""Figures of drivers/bench_gpu.py in a benchmark file, and their picture; no MPI import.

::

    /gpu/<name>            attributes: origin, options, ranks, ...; seconds and TFLOP of a call
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
        if f"gpu/{name}" in file:
            del file[f"gpu/{name}"]
        group = file.create_group(f"gpu/{name}")
        set_attributes(group, attributes)
        for call, x in seconds.items():
            group.create_dataset(call, data=x)


def read_figures(path: str | os.PathLike[str], name: str) -> Figures:
    """Read the figures of one benchmark; OSError or ValueError, with one line, if it has none."""
    with reading(path, SCHEMA) as file:
        group = needed(file, f"gpu/{name}")
        return Figures(plain(group.attrs), arrays(group))


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
