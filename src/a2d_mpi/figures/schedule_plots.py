"""The picture of `drivers/plot.py schedule`; no MPI import.

Everything is read off the schedules.  This module names no method.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from a2d_mpi.cli.workloads import plans_for, read_problem
from a2d_mpi.core.layout import Layout
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
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.compiled import visible_keys
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning import cost
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.model import predict
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.steps import KernelCall
from a2d_mpi.schedules.writing import problem_of, write

RANKS = 64  # at most: more are not told apart
PLANS = 8  # rows of one picture
TOKENS = 72  # drawn, about: with more of them the slices of a rank are not seen
# Paul Tol's muted colours, told apart by colour-blind readers too.
_COLOURS = ("#88CCEE", "#CC6677", "#DDCC77", "#117733", "#332288", "#AA4499", "#44AA99", "#882255",
            "#999933")  # fmt: skip
_HIDDEN = "#E8E8E8"

Timelines = list[list[tuple[str, float, float]]]


@dataclass(frozen=True)
class Panels:
    """One row of the picture.  Ranks are world ranks: neighbours share nodes.

    Attributes
    ----------
    title : str
    computes : (U, n, n) int
        The rank that computes each pair of a query and a key, for each slice of the heads; -1: the
        pair is hidden.
    received : dict of str to (P, P) float64
        Bytes that a rank (row) receives from a rank (column), by phase.
    spans : dict of str to list of list of (str, float, float)
        Part, begin and end in seconds of all that a rank does, by phase and rank.
    """

    title: str
    computes: np.ndarray
    received: dict[str, np.ndarray]
    spans: dict[str, Timelines]

    def seconds(self, phase: str) -> float:
        """Return the end of the slowest rank."""
        return max(of_rank[-1][2] for of_rank in self.spans[phase])


def panels(machine: Machine, method: str, layout: Layout, work: Workload, mask: str) -> Panels:
    """Read everything that is drawn of one plan off its schedules.

    `mask` is the text of the mask; the pairs of a few tokens are drawn.
    """
    world = layout.world_ranks()
    of_world = np.argsort(world)  # the grid rank of each world rank
    problem = problem_of(method, layout, work, work.mask)
    received: dict[str, np.ndarray] = {}
    spans: dict[str, Timelines] = {}
    predict(machine, method, layout, work, spans=spans)
    for phase in work.phases:
        received[phase] = np.zeros((layout.size, layout.size))
        for move in cost.moves(method, layout, problem, None, (phase,)):
            if not move.sent:
                received[phase][world[move.rank], world[move.peer]] += move.nbytes
        spans[phase] = [[x[:3] for x in spans[phase][rank]] for rank in of_world]
    # All shards get the same number of tokens, and few of them if many ranks share a pair.
    pieces = 2 * layout.positions
    drawn = min(work.seqlen, pieces * max(2, TOKENS // (pieces * layout.heads)))
    try:
        small = make_mask(mask, drawn)
    except ValueError:  # the mask has a fixed length, and its first tokens are drawn
        small = IntervalMask(*zip(*visible_keys(work.mask, np.arange(drawn), drawn)))
    work = replace(work, seqlen=drawn, seqlen_kv=drawn, mask=small)
    computes = who_computes(method, layout, work)
    computes = np.where(computes < 0, -1, world[computes])
    shape = f"{layout.rows} x {layout.cols}" + f" x {layout.heads}" * (layout.heads > 1)
    order = f" @{layout.numbering}" * (layout.numbering != "rcu")
    name = f"{method} {shape}{order}, {problem.queries.name}"
    if layout.slices not in (None, (1, 1)):
        name += f", {'x'.join(map(str, layout.slices[: len(work.phases)]))} slices"
    return Panels(name, computes, received, spans)


def blocks(
    method: str, phase: str, layout: Layout, work: Workload, distribution: str | None = None
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the grid rank and the tokens of queries and keys of every kernel call."""
    problem = problem_of(method, layout, work, work.mask, distribution)
    for rank in range(layout.size):
        for program in write(method, phase, layout, problem, rank, work.overlap):
            for step in program.steps:
                if isinstance(step, KernelCall):
                    tokens = (program.tokens(x) for x in (step.queries, step.keys))
                    yield rank, *tokens


def who_computes(
    method: str, layout: Layout, work: Workload, distribution: str | None = None
) -> np.ndarray:
    """Find the grid rank that computes each pair, (U, seqlen, seqlen); -1: the pair is hidden.

    The U ranks of a Ulysses group compute the same pairs, each for its slice of the heads.
    """
    n = work.seqlen
    computes = np.full((layout.heads, n, n), -1)
    for rank, queries, keys in blocks(method, work.phases[0], layout, work, distribution):
        tile = computes[rank % layout.heads][np.ix_(queries, keys)]
        tile[work.mask.dense(queries, keys)] = rank
        computes[rank % layout.heads][np.ix_(queries, keys)] = tile
    return computes


def plot_schedule(args: argparse.Namespace) -> int:
    """Draw a row of panels for each plan that is asked for; returns the exit code."""
    check_picture(args.output)
    machine, work = read_problem(args)
    found = plans_for(work, args.plans, args.ranks, machine)
    if not 1 <= len(found) <= PLANS:
        raise ValueError(f"--plans must be 1 to {PLANS} plans, got {len(found)}")
    rows = [panels(machine, x.method, x.layout, work, args.mask) for x in found]
    plt = pyplot(**SETTINGS | {"axes.spines.top": True, "axes.spines.right": True})
    from matplotlib.ticker import EngFormatter

    in_bytes, in_seconds = EngFormatter("B", 1), EngFormatter("s", 2)
    phases = tuple(rows[0].spans)
    colours = _colours(args.ranks, machine.ranks_per_node)
    widths = [1.0, *[1.2] * len(phases), *[2.0] * len(phases)]
    figure, all_axes = plt.subplots(
        len(rows), len(widths), figsize=(1.5 * sum(widths), 1.75 * len(rows) + 0.3),
        width_ratios=widths, squeeze=False, layout="constrained",
    )  # fmt: skip
    for row, (first, *others) in zip(rows, all_axes):
        _computes(first, row, colours)
        for phase, matrix, time in zip(phases, others, others[len(phases) :]):
            most = max(x.received[phase].max() for x in rows)
            _received(matrix, row.received[phase], most, colours, machine.ranks_per_node)
            _timeline(time, row.spans[phase], max(x.seconds(phase) for x in rows), colours)
            received = in_bytes(row.received[phase].sum(axis=1).max())
            matrix.set_title(f"{phase}: {received} to a rank", loc="left")
            time.set_title(f"{phase}: {in_seconds(row.seconds(phase))}", loc="left")
    title = f"simulated: {workload_title(work.attributes, in_short(work.seqlen))}"
    title += f"; {args.ranks} ranks, {nodes_of(machine.name)}"
    save(finish(figure, title), args.output)
    return 0


def _colours(ranks: int, ranks_per_node: int) -> np.ndarray:
    """Choose a hue for each node, lighter from rank to rank, or for each rank without nodes."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba_array

    a_node = ranks_per_node if 1 < ranks_per_node < ranks else 1
    node, place = np.divmod(np.arange(ranks), a_node)
    hues = to_rgba_array(_COLOURS)
    if (nodes := node[-1] + 1) > len(hues):
        hues = colormaps["viridis"]((np.arange(nodes) + 0.5) / nodes)
    light = 0.65 * place[:, None] / a_node
    return (hues[node] + (1 - hues[node]) * light)[:, :3]


def _computes(axes, row: Panels, colours: np.ndarray) -> None:
    """Draw queries x keys; the ranks of a Ulysses group share a pair, as stripes."""
    from matplotlib.colors import to_rgb

    heads, n, _ = row.computes.shape
    stripes = row.computes.transpose(1, 2, 0).reshape(n, n * heads)
    image = np.array([*colours, to_rgb(_HIDDEN)])[stripes]  # -1 is the last
    axes.imshow(image, extent=(0, n, n, 0), interpolation="nearest")
    axes.set(xlabel=f"key ({n} tokens)", ylabel="query", xticks=[], yticks=[])
    # A long title would run into the next panel.
    name = row.title.replace(", ", ",\n") if len(row.title) > 26 else row.title
    axes.set_title(name, loc="left", fontweight="bold")


def _received(
    axes, received: np.ndarray, most: float, colours: np.ndarray, ranks_per_node: int
) -> None:
    """Draw receiver x sender, with lines between nodes."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import EngFormatter

    blues = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1, 256)))  # the least is not white
    shown = np.ma.masked_equal(received, 0)
    image = axes.imshow(shown, cmap=blues, vmin=0, vmax=max(most, 1))
    bar = axes.figure.colorbar(
        image, ax=axes, shrink=0.85, pad=0.03, aspect=15, format=EngFormatter("B")
    )
    bar.outline.set_linewidth(0)
    if ranks_per_node > 1:
        for edge in range(ranks_per_node, len(received), ranks_per_node):
            axes.axvline(edge - 0.5, color="#999999", linewidth=0.5)
            axes.axhline(edge - 0.5, color="#999999", linewidth=0.5)
    axes.set(xlabel="from rank", ylabel="to rank")
    _mark(axes, colours, both=True)


def _timeline(axes, spans: Timelines, end: float, colours: np.ndarray) -> None:
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


def _mark(axes, colours: np.ndarray, both: bool = False) -> None:
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
