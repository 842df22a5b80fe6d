"""The figure that says when 2-D attention matters; no MPI import.

It shows the times of plans by the ratio of computing to transfers.  The folder crossover of
`jobs/run.py study` has one workload on emulated clusters whose links differ, with a profile beside
each file of results.  The same plans on real machines are simulated for many lengths of the
sequence.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from a2d_mpi.core.sizes import Layout
from a2d_mpi.experiments.results import read_measured
from a2d_mpi.figures.pictures import WIDTH, finish, plain_ticks, style
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.model import slowest_seconds
from a2d_mpi.planning.planner import best_candidate, candidate
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload

RANKS = 16
# The method and the shape of each plan; the planner's pick has none.
PLANS = {
    "ring": ("ring", Layout(16, 1)),
    "square grid 4 x 4": ("attention2d", Layout(4, 4)),
    "USP, ring of 4 x 4 head ranks": ("ring", Layout(4, 1, 4)),
    "the planner's pick": None,
}
# The ring is the line at 1.
STYLES = {
    "square grid 4 x 4": style("attention2d"),
    "USP, ring of 4 x 4 head ranks": style("ring + heads"),
    "the planner's pick": {"color": "black", "marker": "*"},
}
MACHINES = {"H100": ("h100-64x1", "-"), "A100": ("a100-4-1nic", "--")}  # one NIC for each GPU
# Below 32K tokens kernels wait for their launches, and the ratio rises again.
TOKENS = [1 << i for i in range(15, 23)]
MARKED = {1 << 15: "32K", 1 << 17: "128K", 1 << 18: "256K", 1 << 20: "1M", 1 << 22: "4M"}


class Point(NamedTuple):
    """The seconds of each plan at one ratio of computing to the transfers of the ring."""

    ratio: float
    seconds: dict[str, float]

    def gain(self, plan: str) -> float:
        """Divide the time of the ring by the time of a plan."""
        return self.seconds["ring"] / self.seconds[plan]


def measured(folder: Path) -> list[Point]:
    """Read the points of a folder, sorted by their ratios.

    Raises
    ------
    ValueError
        If there is no file of results, no profile beside one, or one lacks a plan.
    """
    points = []
    for path in sorted(folder.glob("*/*.h5")):
        bandwidth = read_machine(path.with_suffix(".toml")).links(RANKS)[1].bandwidth
        results = read_measured(path)
        seconds = {}
        for label, plan in PLANS.items():
            runs = [x for x in results if (x.picked if plan is None else _is(x.config, *plan))]
            if not runs:
                raise ValueError(f"{path} has no {label}")
            seconds[label] = runs[0].seconds
            if label == "ring":
                ratio = runs[0].parts["compute"] / (runs[0].received / bandwidth)
        points.append(Point(ratio, seconds))
    if not points:
        raise ValueError(f"{folder} has no file */*.h5")
    return sorted(points)


def _is(config, method: str, layout: Layout) -> bool:
    shape = tuple(int(config[x]) for x in ("rows", "cols", "heads"))
    return config["method"] == method and shape == (layout.rows, layout.cols, layout.heads)


def simulated(machine: Machine) -> Iterator[Point]:
    """Simulate 16 ranks of a machine for each length: 8 heads of 128, causal, with gradients."""
    bandwidth = machine.links(RANKS)[1].bandwidth
    for tokens in TOKENS:
        work = Workload(tokens, 8, 128, mask=Causal(), backward=True)
        plans = {x: candidate(machine, *plan, work) for x, plan in PLANS.items() if plan}
        plans["the planner's pick"] = best_candidate(machine, RANKS, work)
        ring = plans["ring"]
        ratio = ring.split["compute"] / (ring.received / bandwidth)
        yield Point(ratio, {x: slowest_seconds(plan.phases) for x, plan in plans.items()})


def read_crossover(args: argparse.Namespace) -> dict[str, list[Point]]:
    """Collect the measured and the simulated points, by their source."""
    profiles = Path(__file__).parents[3] / "data/machines"
    points = {"measured": measured(Path(args.results))}
    for name, (profile, _) in MACHINES.items():
        machine = read_machine(profiles / f"{profile}.toml").with_ranks_per_node(1)
        points[name] = list(simulated(machine))
    return points


def draw_crossover(plt, sources: dict[str, list[Point]]):
    """Draw how much faster than the ring each plan is, by the ratio."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.55 * WIDTH))
    for plan, look in STYLES.items():
        for source, points in sources.items():
            x, y = [p.ratio for p in points], [p.gain(plan) for p in points]
            if source == "measured":
                axes.plot(x, y, linestyle=":", linewidth=0.5, markersize=5, label=plan, **look)
            else:
                axes.plot(x, y, MACHINES[source][1], color=look["color"])
    for name, (_, line) in MACHINES.items():
        axes.plot([], [], line, color="#777777", label=f"simulated, {name}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="time of computing / time of the ring's transfers")
    axes.set_ylabel("time of the ring / time of the plan")
    axes.grid(axis="y", linewidth=0.3)
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis, range(1, 7))
    for place, name in enumerate(MACHINES):  # where each machine stands
        tops = axes.secondary_xaxis(1.02 + 0.2 * place)
        marks = {p.ratio: MARKED[n] for n, p in zip(TOKENS, sources[name]) if n in MARKED}
        tops.set_xticks(list(marks), list(marks.values()))
        tops.minorticks_off()
        tops.set_xlabel(f"tokens on 16 {name}", labelpad=2)
    return finish(figure, "causal, with gradients, 16 nodes; points: measured with 8K tokens")
