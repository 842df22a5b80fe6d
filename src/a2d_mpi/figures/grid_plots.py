"""The picture of `drivers/plot.py grid`; no MPI import."""

from __future__ import annotations

import argparse

import numpy as np

from a2d_mpi.figures.mask_plots import tiling
from a2d_mpi.figures.pictures import COLOURS, check_picture, contrast, deepest, pyplot, save

LONGEST = 4096  # tokens: every pair of them is a pixel


def plot_grid(args: argparse.Namespace) -> int:
    """Draw; returns the exit code."""
    rows, cols, n = args.rows, args.cols, args.seqlen
    if rows * cols > len(COLOURS):
        raise ValueError(f"--rows x --cols must be 1 to {len(COLOURS)} ranks, got {rows} x {cols}")
    check_picture(args.output)
    plt = pyplot(**{"axes.titlesize": 10})
    from matplotlib.colors import ListedColormap

    tiles = tiling(args.mask, n, rows, cols, args.distribution)

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), width_ratios=(1, 1.1))
    palette = ListedColormap(COLOURS[: rows * cols])
    shown = np.ma.masked_less(tiles.ranks, 0)
    left.imshow(shown, cmap=palette, vmin=-0.5, vmax=rows * cols - 0.5, interpolation="nearest")
    left.set(xlabel="key token", ylabel="query token", xticks=[0, n - 1], yticks=[0, n - 1])
    left.set_title(f"{args.mask}, {tiles.distribution}: the rank that computes each pair")

    for rank, area in enumerate(tiles.areas):
        r, c = divmod(rank, cols)
        box = plt.Rectangle((c, r), 0.84, 0.7, facecolor=COLOURS[rank], edgecolor="black")
        right.add_patch(box)
        label = f"rank {rank}\nwork {area / tiles.areas.mean():.2f}"
        look = {"ha": "center", "va": "center", "color": contrast(COLOURS[rank])}
        right.text(c + 0.42, r + 0.35, label, **look)
        if area:
            y, x, _ = deepest(tiles.ranks == rank)
            left.text(x, y, rank, **look)
    arrow = {"arrowstyle": "<->", "linewidth": 1.5}
    for r in range(rows):
        right.annotate("", (0, r + 0.78), (cols - 0.16, r + 0.78), arrowprops=arrow)
    right.text(cols / 2 - 0.08, rows - 0.05, "along a row: gather Q, return partial out (dQ)",
               ha="center", va="top")  # fmt: skip
    for c in range(cols):
        right.annotate("", (c + 0.92, 0), (c + 0.92, rows - 0.3), arrowprops=arrow)
    right.text(cols + 0.05, rows / 2 - 0.15, "along a column:\ngather K, V\n(return dK, dV)",
               ha="left", va="center")  # fmt: skip
    right.set(xlim=(-0.05, cols + 1), ylim=(rows + 0.15, -0.2))
    right.axis("off")
    right.set_title(f"{rows} x {cols} grid of ranks; work: pairs / mean")
    figure.tight_layout()
    save(figure, args.output, dpi=110)
    return 0
