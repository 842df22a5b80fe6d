"""The pictures of masks of drivers/plot.py and drivers/report.py; no MPI import."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.mask_table import Table
from a2d_mpi.figures.pictures import check_picture, pyplot, save
from a2d_mpi.figures.schedule_panels import who_computes
from a2d_mpi.masks.patterns import PATTERNS, make_mask
from a2d_mpi.schedules import default_distribution
from a2d_mpi.schedules.problem import Workload

# Okabe and Ito: told apart by colour-blind readers too.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999")
RANKS = len(COLOURS)  # at most
LONGEST = 1024  # tokens: every pair of them is a dot
MASKS = 32  # of one picture
_SEEN, _HIDDEN = "#444444", "#F4F4F4"
_COLUMNS = 2  # masks beside each other


@dataclass(frozen=True)
class Tiling:
    """The pairs of a mask, by the rank that computes them.

    Attributes
    ----------
    text : str
        Of the mask.
    distribution : str
    ranks : (seqlen, seqlen) int
        By query and key; -1: the pair is hidden.
    areas : (ranks,) int
        Visible pairs of each rank.
    """

    text: str
    distribution: str
    ranks: np.ndarray
    areas: np.ndarray

    @property
    def imbalance(self) -> float:
        """Largest area over the mean; 1 if nothing is visible."""
        return float(self.areas.max() / self.areas.mean()) if self.areas.any() else 1.0


def tiling(text: str, seqlen: int, rows: int, cols: int, distribution: str | None) -> Tiling:
    """The ranks of an R x C grid that compute the pairs of a mask.

    Parameters
    ----------
    text : str
        Of the mask.
    seqlen, rows, cols : int
    distribution : str, optional
        Default: as of a plan.

    Raises
    ------
    ValueError
        If the mask is unknown or does not fit.
    """
    work = Workload(seqlen, 1, 1, mask=make_mask(text, seqlen))
    layout = Layout(rows, cols)
    name = distribution or default_distribution("attention2d", layout, work, work.mask)[0]
    (ranks,) = who_computes("attention2d", layout, work, name)
    areas = np.bincount(ranks[ranks >= 0], minlength=rows * cols)
    return Tiling(text, name, ranks, areas)


def plot_masks(args: argparse.Namespace) -> int:
    """Draw the masks that are asked for; returns the exit code."""
    if args.rows * args.cols > RANKS:
        raise ValueError(
            f"--rows x --cols must be 1 to {RANKS} ranks, got {args.rows} x {args.cols}"
        )
    check_picture(args.output)
    if len(args.masks) > MASKS:
        raise ValueError(f"--masks must be at most {MASKS} masks, got {len(args.masks)}")
    grid = args.rows, args.cols
    tilings = [tiling(text, args.seqlen, *grid, args.distribution) for text in args.masks]
    save(draw(tilings, *grid), args.output, dpi=120)
    return 0


def draw(tilings: list[Tiling], rows: int, cols: int):
    """Draw two panels for each mask; returns the figure."""
    plt = pyplot(**{"font.size": 7, "axes.titlesize": 7, "axes.linewidth": 0.4})
    from matplotlib.colors import ListedColormap

    columns = min(_COLUMNS, len(tilings))
    lines = -(-len(tilings) // columns)
    figure, axes = plt.subplots(
        lines, 2 * columns, figsize=(3.4 * columns, 1.8 * lines + 0.4), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    palettes = ListedColormap([_HIDDEN, _SEEN]), ListedColormap([_HIDDEN, *COLOURS[: rows * cols]])
    for x in axes.flat:
        x.axis("off")
    for i, found in enumerate(tilings):
        left, right = axes[i // columns, 2 * (i % columns) :][:2]
        images = np.minimum(found.ranks, 0), found.ranks
        titles = found.text, f"{found.distribution}, max/mean {found.imbalance:.2f}"
        for panel, image, palette, title in zip((left, right), images, palettes, titles):
            panel.axis("on")
            panel.imshow(image + 1, cmap=palette, vmin=-0.5, vmax=palette.N - 0.5,
                         interpolation="nearest")  # fmt: skip
            panel.set(xticks=[], yticks=[])
            panel.set_title(title, loc="left", fontweight="bold" if panel is left else "normal")
        left.set_ylabel("query")
        left.set_xlabel("key")
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=COLOURS[rank], label=f"rank {rank}")
        for rank in range(rows * cols)
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=rows * cols, frameon=False)
    return figure


def draw_table(table: Table):
    """Draw bytes and balance of all plans by mask, medians and ranges of all seeds."""
    plt = pyplot(**{"font.size": 7, "axes.titlesize": 8})
    ranks = sorted({key[0] for key in table})
    masks = [x for x in PATTERNS if any(key[2].partition(":")[0] == x for key in table)]
    plans = list(dict.fromkeys(key[3] for key in table))
    figure, axes = plt.subplots(
        len(ranks), 2, figsize=(7.2, 0.8 + 3.2 * len(ranks)), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, number in zip(axes, ranks):
        for panel, what, unit in (
            (line[0], "moved", "bytes of the largest rank / bytes of q"),
            (line[1], "uneven", "visible pairs of the largest rank / mean"),
        ):
            for i, plan in enumerate(plans):
                _points(panel, table, (number, masks, plan, what), i, len(plans))
            panel.set_xlabel(unit)
            panel.set_title(f"{number} ranks", loc="left")
            panel.grid(axis="x", linewidth=0.3)
        line[0].set_xscale("symlog", linthresh=0.01)  # equal documents move nothing
        line[0].set_yticks(range(len(masks)), masks)
        line[0].set_ylim(len(masks) - 0.5, -0.5)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center",
                  ncols=len(plans), frameon=False)  # fmt: skip
    return figure


def _points(panel, table: Table, chosen: tuple, i: int, plans: int) -> None:
    """Draw one plan: the median of the seeds of each mask, and a line over all of them."""
    number, masks, plan, what = chosen
    found = [
        [
            getattr(x, what)
            for (ranks, _, text, name), x in table.items()
            if (ranks, name, text.partition(":")[0]) == (number, plan, mask)
        ]
        for mask in masks
    ]
    height = np.arange(len(masks)) + 0.7 * ((i + 0.5) / plans - 0.5)
    colour = COLOURS[i % len(COLOURS)]
    there = [j for j, x in enumerate(found) if x]
    panel.hlines(
        height[there],
        [min(found[j]) for j in there],
        [max(found[j]) for j in there],
        color=colour,
        linewidth=1,
    )
    medians = [np.median(found[j]) for j in there]
    panel.plot(medians, height[there], "o", color=colour, markersize=3, label=plan)
