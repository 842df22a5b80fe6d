"""The pictures of `drivers/plot.py masks` and `grid`: the rank of each pair; no MPI import."""

from __future__ import annotations

import argparse

import numpy as np

from a2d_mpi.core.layout import Layout
from a2d_mpi.figures.pictures import COLOURS, SETTINGS, WIDTH, check_picture, finish, pyplot, save
from a2d_mpi.figures.schedule_plots import who_computes
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.writing import default_distribution

RANKS = len(COLOURS)  # at most
LONGEST = 1024  # tokens: every pair of them is a dot
_SEEN, _HIDDEN = "#444444", "#F4F4F4"
_COLUMNS = 3  # masks beside each other


def plot_masks(args: argparse.Namespace) -> int:
    """Draw the visible pairs of each mask, and the rank of each pair; returns the exit code."""
    plt = _pyplot(args, **SETTINGS | {"axes.spines.top": True, "axes.spines.right": True})
    tilings = [tiling(x, args) for x in args.masks]
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
    for text, tiles, left, right in zip(args.masks, tilings, grid.flat[::2], grid.flat[1::2]):
        name, ranks, areas = tiles
        visible = (ranks >= 0)[..., None]
        left.imshow(np.where(visible, seen, hidden), interpolation="nearest")
        left.set(xlabel="key", ylabel="query")
        left.set_title(text, loc="left")
        # -1 is the last.
        right.imshow(np.array([*of_ranks, hidden])[ranks], interpolation="nearest")
        imbalance = areas.max() / areas.mean() if areas.any() else 1.0
        right.set_xlabel(f"{name}, {imbalance:.2f}")
    for rank in range(args.rows * args.cols):
        grid[0, 0].fill([], [], color=COLOURS[rank], label=f"rank {rank}")
    title = "left: visible pairs; right: the rank that computes each pair; "
    save(finish(figure, f"{title}number: the largest rank's pairs / mean"), args.output)
    return 0


def plot_grid(args: argparse.Namespace) -> int:
    """Draw the rank of each pair, and what ranks exchange; returns the exit code."""
    rows, cols, last = args.rows, args.cols, args.seqlen - 1
    plt = _pyplot(args, **{"axes.titlesize": 10})
    name, ranks, areas = tiling(args.mask, args)
    from matplotlib.colors import ListedColormap, to_rgb

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), width_ratios=(1, 1.1))
    palette = ListedColormap(COLOURS[: rows * cols])
    shown = np.ma.masked_less(ranks, 0)
    left.imshow(shown, cmap=palette, vmin=-0.5, vmax=rows * cols - 0.5, interpolation="nearest")
    left.set(xlabel="key token", ylabel="query token", xticks=[0, last], yticks=[0, last])
    left.set_title(f"{args.mask}, {name}: the rank that computes each pair")
    for rank, area in enumerate(areas):
        r, c = divmod(rank, cols)
        box = plt.Rectangle((c, r), 0.84, 0.7, facecolor=COLOURS[rank], edgecolor="black")
        right.add_patch(box)
        label = f"rank {rank}\nwork {area / areas.mean():.2f}"
        colour = "white" if sum(to_rgb(COLOURS[rank])) < 1.3 else "black"
        right.text(c + 0.42, r + 0.35, label, ha="center", va="center", color=colour)
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


def _pyplot(args: argparse.Namespace, **settings: object):
    """Check the options of both pictures; import pyplot with settings."""
    if args.rows * args.cols > RANKS:
        raise ValueError(
            f"--rows x --cols must be 1 to {RANKS} ranks, got {args.rows} x {args.cols}"
        )
    check_picture(args.output)
    return pyplot(**settings)


def tiling(text: str, args: argparse.Namespace) -> tuple[str, np.ndarray, np.ndarray]:
    """Find the ranks of a grid that compute the pairs of a mask.

    Parameters
    ----------
    text : str
        The name and the arguments of the mask.
    args
        Has seqlen, rows, cols, and distribution; None: the distribution that a plan takes.

    Returns
    -------
    distribution : str
    ranks : (seqlen, seqlen) int
        The rank that computes each pair of a query and a key; -1: the pair is hidden.
    areas : (ranks,) int
        Visible pairs of each rank.

    Raises
    ------
    ValueError
        If the mask does not fit.
    """
    work = Workload(args.seqlen, 1, 1, mask=make_mask(text, args.seqlen))
    layout = Layout(args.rows, args.cols)
    name = args.distribution
    name = name or default_distribution("attention2d", layout, work, work.seen)[0]
    (ranks,) = who_computes("attention2d", layout, work, name)
    return name, ranks, np.bincount(ranks[ranks >= 0], minlength=layout.size)
