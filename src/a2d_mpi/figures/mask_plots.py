"""The pictures of masks of drivers/plot.py; no MPI import."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from a2d_mpi.core.sizes import Layout
from a2d_mpi.figures.pictures import (
    COLOURS,
    SETTINGS,
    WIDTH,
    check_picture,
    contrast,
    deepest,
    finish,
    pyplot,
    save,
)
from a2d_mpi.figures.schedule_panels import who_computes
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules import default_distribution

RANKS = len(COLOURS)  # at most
LONGEST = 1024  # tokens: every pair of them is a dot
MASKS = 32  # of one picture
_SEEN, _HIDDEN = "#444444", "#F4F4F4"
ROOM = 20  # a rank's number is shown in areas that are wider than 2 / ROOM of the picture
_COLUMNS = 3  # masks beside each other


@dataclass(frozen=True)
class Tiling:
    """The pairs of a mask, by the rank that computes them.

    Attributes
    ----------
    text : str
        The name and the arguments of the mask.
    distribution : str
    ranks : (seqlen, seqlen) int
        The rank that computes each pair of a query and a key; -1: the pair is hidden.
    areas : (ranks,) int
        Visible pairs of each rank.
    """

    text: str
    distribution: str
    ranks: np.ndarray
    areas: np.ndarray


def tiling(text: str, seqlen: int, rows: int, cols: int, distribution: str | None) -> Tiling:
    """Find the ranks of an R x C grid that compute the pairs of a mask.

    Parameters
    ----------
    text : str
        The name and the arguments of the mask.
    seqlen, rows, cols : int
    distribution : str, optional
        Default: the distribution that a plan takes.

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
    save(draw(tilings, *grid), args.output)
    return 0


def draw(tilings: list[Tiling], rows: int, cols: int):
    """Draw two panels for each mask; returns the figure."""
    plt = pyplot(**SETTINGS | {"axes.spines.top": True, "axes.spines.right": True})
    from matplotlib.colors import to_rgb

    hidden, seen, *of_ranks = map(to_rgb, (_HIDDEN, _SEEN, *COLOURS))
    columns = min(_COLUMNS, len(tilings))
    lines = -(-len(tilings) // columns)
    figure, grid = plt.subplots(
        lines, 2 * columns, figsize=(WIDTH / 3 * columns, 1.25 * lines + 0.3), squeeze=False
    )
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    for axes in grid.flat[2 * len(tilings) :]:
        axes.axis("off")
    for shown, left, right in zip(tilings, grid.flat[::2], grid.flat[1::2]):
        visible = (shown.ranks >= 0)[..., None]
        left.imshow(np.where(visible, seen, hidden), interpolation="nearest")
        left.set(xlabel="key", ylabel="query")
        left.set_title(shown.text, loc="left")
        # -1 is the last.
        right.imshow(np.array([*of_ranks, hidden])[shown.ranks], interpolation="nearest")
        imbalance = shown.areas.max() / shown.areas.mean() if shown.areas.any() else 1.0
        right.set_xlabel(f"{shown.distribution}, {imbalance:.2f}")
        for rank in np.flatnonzero(shown.areas):
            y, x, distance = deepest(shown.ranks == rank)
            if distance * ROOM > len(visible):  # else the number would hide what is around it
                right.text(x, y, rank, ha="center", va="center", color=contrast(COLOURS[rank]))
    for rank in range(rows * cols):
        grid[0, 0].fill([], [], color=COLOURS[rank], label=f"rank {rank}")
    return finish(
        figure, "left: visible pairs; right: the rank that computes each pair; "
        "number: the largest rank's pairs / mean",
    )  # fmt: skip
