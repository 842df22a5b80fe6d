"""The picture of `drivers/plot.py schedule`; no MPI import."""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np

from a2d_mpi.experiments.plan import read_problem
from a2d_mpi.experiments.sweep import mask_of, plans_for
from a2d_mpi.figures.pictures import (
    SETTINGS,
    check_picture,
    finish,
    in_short,
    nodes_of,
    pyplot,
    save,
    timeline,
    workload_title,
)
from a2d_mpi.figures.schedule_panels import Panels, Timelines, panels

RANKS = 64  # at most: more are not told apart
PLANS = 8  # rows of one picture
# Paul Tol's muted colours, told apart by colour-blind readers too.
_COLOURS = ("#88CCEE", "#CC6677", "#DDCC77", "#117733", "#332288", "#AA4499", "#44AA99", "#882255",
            "#999933")  # fmt: skip
_HIDDEN = "#E8E8E8"


def plot_schedule(args: argparse.Namespace) -> int:
    """Draw the plans that are asked for; returns the exit code."""
    check_picture(args.output)
    machine, case = read_problem(args)
    found = plans_for(case, args.plans, args.ranks, (args.overlap,), machine)
    if not 1 <= len(found) <= PLANS:
        raise ValueError(f"--plans must be 1 to {PLANS} plans, got {len(found)}")
    small = partial(mask_of, case.mask)
    rows = [panels(machine, x.method, x.layout, case.work(x.overlap), small) for x in found]
    workload = workload_title(vars(case), in_short(case.seqlen))
    title = f"simulated: {workload}; {args.ranks} ranks, {nodes_of(machine.name)}"
    save(draw(rows, machine.ranks_per_node, title), args.output)
    return 0


def draw(rows: list[Panels], ranks_per_node: int, title: str = ""):
    """Draw a row of panels for each plan; returns the figure."""
    plt = pyplot(**SETTINGS | {"axes.spines.top": True, "axes.spines.right": True})
    from matplotlib.ticker import EngFormatter

    in_bytes, in_seconds = EngFormatter("B", 1), EngFormatter("s", 2)
    phases = tuple(rows[0].spans)
    colours = _colours(len(rows[0].spans[phases[0]]), ranks_per_node)
    widths = [1.0, *[1.2] * len(phases), *[2.0] * len(phases)]
    figure, all_axes = plt.subplots(
        len(rows), len(widths), figsize=(1.5 * sum(widths), 1.75 * len(rows) + 0.3),
        width_ratios=widths, squeeze=False, layout="constrained",
    )  # fmt: skip
    for row, (first, *others) in zip(rows, all_axes):
        _computes(first, row.computes, colours)
        # A long title would run into the next panel.
        name = row.title.replace(", ", ",\n") if len(row.title) > 26 else row.title
        first.set_title(name, loc="left", fontweight="bold")
        for phase, matrix, time in zip(phases, others, others[len(phases) :]):
            most = max(x.received[phase].max() for x in rows)
            _received(figure, matrix, row.received[phase], most, colours, ranks_per_node)
            end = max(_end(x.spans[phase]) for x in rows)
            _timeline(time, row.spans[phase], end, colours)
            received = in_bytes(row.received[phase].sum(axis=1).max())
            matrix.set_title(f"{phase}: {received} to a rank", loc="left")
            time.set_title(f"{phase}: {in_seconds(_end(row.spans[phase]))}", loc="left")
    return finish(figure, title)


def _end(spans: Timelines) -> float:
    """Find the end of the slowest rank, in seconds."""
    return max(of_rank[-1][2] for of_rank in spans)


def _colours(ranks: int, ranks_per_node: int) -> list[tuple]:
    """Choose a hue for each node, lighter from rank to rank, or for each rank without nodes."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    a_node = ranks_per_node if 1 < ranks_per_node < ranks else 1
    nodes = -(-ranks // a_node)
    few = nodes <= len(_COLOURS)
    colours = []
    for rank in range(ranks):
        node, place = divmod(rank, a_node)
        hue = _COLOURS[node] if few else colormaps["viridis"]((node + 0.5) / nodes)
        light = 0.65 * place / a_node
        colours.append(tuple(x + (1 - x) * light for x in to_rgb(hue)))
    return colours


def _computes(axes, computes: np.ndarray, colours: list[tuple]) -> None:
    """Draw queries x keys; the ranks of a Ulysses group share a pair, as stripes."""
    from matplotlib.colors import to_rgb

    heads, n, _ = computes.shape
    stripes = computes.transpose(1, 2, 0).reshape(n, n * heads)
    image = np.array([*colours, to_rgb(_HIDDEN)])[stripes]  # -1 is the last
    axes.imshow(image, extent=(0, n, n, 0), interpolation="nearest")
    axes.set(xlabel=f"key ({n} tokens)", ylabel="query", xticks=[], yticks=[])


def _received(figure, axes, received, most, colours, ranks_per_node) -> None:
    """Draw receiver x sender, with lines between nodes."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import EngFormatter

    ranks = len(received)
    blues = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256)))  # the least is not white
    shown = np.ma.masked_equal(received, 0)
    image = axes.imshow(shown, cmap=blues, vmin=0, vmax=max(most, 1))
    bar = figure.colorbar(
        image, ax=axes, shrink=0.85, pad=0.03, aspect=15, format=EngFormatter("B")
    )
    bar.outline.set_linewidth(0)
    if ranks_per_node > 1:
        for edge in range(ranks_per_node, ranks, ranks_per_node):
            axes.axvline(edge - 0.5, color="#999999", linewidth=0.5)
            axes.axhline(edge - 0.5, color="#999999", linewidth=0.5)
    axes.set(xlabel="from rank", ylabel="to rank")
    _mark(axes, colours, both=True)


def _timeline(axes, spans: Timelines, end: float, colours) -> None:
    """Draw time x ranks."""
    from matplotlib.ticker import EngFormatter

    for rank, of_rank in enumerate(spans):
        # Other work is under the rest, so that no gaps show between the bars.
        bars = [x for x in of_rank if x[0] != "other"]
        timeline(axes, rank, [("other", 0, of_rank[-1][2]), *bars], 0.84)
    axes.set(ylabel="rank", xlim=(0, 1.02 * end))
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.set_ylim(len(spans) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    _mark(axes, colours)


def _mark(axes, colours: list[tuple], both: bool = False) -> None:
    """Put the colour of each rank beside it."""
    from matplotlib.transforms import ScaledTranslation

    points = axes.figure.dpi_scale_trans
    ranks, zeros = range(len(colours)), [0] * len(colours)
    style = {"c": colours, "marker": "s", "s": min(14, 500 / len(colours) ** 1.5),
             "clip_on": False, "linewidths": 0}  # fmt: skip
    beside = axes.get_yaxis_transform() + ScaledTranslation(-4 / 72, 0, points)
    axes.scatter(zeros, ranks, transform=beside, **style)
    if both:
        below = axes.get_xaxis_transform() + ScaledTranslation(0, -4 / 72, points)
        axes.scatter(ranks, zeros, transform=below, **style)
    for axis in (axes.yaxis, axes.xaxis)[: 1 + both]:
        axis.set_ticks(ranks[:: -(-len(ranks) // 8)])
        axis.set_tick_params(length=0, pad=7)
