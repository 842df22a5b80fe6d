"""Plans replayed by SimGrid: against formulas, the simulator, and what was measured.

Apart from the default tests, as it needs SimGrid and a compiler (g++, libsimgrid-dev):

    python -m pytest tests/tools/simgrid_replay.py
    python tests/tools/simgrid_replay.py 16 64    # all methods on so many ranks, both simulators
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from machines import RESULTS, machine, plan_of
from test_simulate import PLANS

from a2d_mpi.core.layout import Layout
from a2d_mpi.experiments.hdf5 import read_file
from a2d_mpi.experiments.results import BENCHMARK_SCHEMA, summarise
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.planning import simulator
from a2d_mpi.planning.machine import Link, Machine
from a2d_mpi.planning.model import slowest_seconds
from a2d_mpi.planning.network import PORTS, Cables, Network
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.simgrid import simulate
from a2d_mpi.planning.survey import survey_of
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.writing import problem_of

LINK = Link(1e6, latency=1e-3, overhead=1e-5)


def work_of(mask=None, seqlen=4096, **others):
    return Workload(seqlen, 4, 8, 4, dtype="float32", mask=mask or Full(), **others)


def of_ring(ranks, seqlen=4096):
    """Seconds of a hop, by hand: keys and values of a shard."""
    return 2 * (seqlen // ranks) * 4 * 8 * 4 / LINK.bandwidth


def shared(profile: Machine, method: str, layout: Layout, work: Workload) -> dict[str, np.ndarray]:
    """Seconds of every rank by the simulator; all messages on a link share it, as in SimGrid."""
    found = {}
    cables, place = Cables(Network(), profile, layout.size), layout.world_ranks()
    for phase in work.phases:
        problem = problem_of(method, layout, work, work.mask)
        programs = survey_of(profile, method, layout, work, problem, phase)[:2]
        found[phase] = sum(simulator.simulate(*programs, cables, place, in_order=False).values())
    return found


@pytest.mark.parametrize("method, layout", PLANS)
def test_all_plans_end(method, layout):
    mask = Causal()
    work = work_of(mask, 96, backward=True)
    found = simulate(machine(LINK), method, layout, work)
    for phase, seconds in shared(machine(LINK), method, layout, work).items():
        assert seconds == pytest.approx(found[phase].total, rel=0.01)


def test_a_ring_takes_its_hops():
    found = slowest_seconds(simulate(machine(LINK), "ring", Layout(8, 1), work_of()))
    hops = 7 * (of_ring(8) + LINK.latency)
    assert hops < found < 1.02 * hops


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_oversubscription(factor):
    # Each Ulysses group has two ranks, under different switches: all messages cross.
    layout = Layout(2, 1, PORTS, order="rcu")
    work = replace(work_of(seqlen=1 << 12), nheads=PORTS, nheads_kv=PORTS)
    tree = Network("fat tree", factor)
    plan = machine(LINK), "ring", layout, work
    whole, over = (slowest_seconds(simulate(*plan, network=x)) for x in (Network(), tree))
    hop = 2 * (work.seqlen // 2) * 8 * 4 / LINK.bandwidth
    assert over - whole == pytest.approx((factor - 1) * hop, rel=0.05, abs=1e-3)


@pytest.mark.parametrize("method, layout, stages", [
    # Gathers and returns.
    ("attention2d", Layout(1, 16), {"forward": 2, "backward": 2}),
    ("ring", Layout(8, 1), {"forward": 7}),
])  # fmt: skip
def test_coarse(method, layout, stages):
    """A message may end too early or too late by the given time, and a stage waits for another."""
    work = work_of(Causal(), 1 << 13, backward="backward" in stages)
    exact = simulate(machine(LINK), method, layout, work)
    for share in (1e-3, 1e-2):
        seconds = share * slowest_seconds(exact)
        found = simulate(machine(LINK), method, layout, work, coarse=seconds)
        for phase, number in stages.items():
            error = abs(found[phase].total.max() - exact[phase].total.max())
            assert 0 < error < number * seconds, (phase, error / seconds)


@pytest.mark.parametrize("name", ["16x1", "64x1", "16x4"])
def test_measured_runs(name):
    """What docs/planning.md says of each emulated cluster."""
    profile, off = read_machine(RESULTS / f"{name}.toml"), []
    for result in read_file(RESULTS / f"{name}.h5", BENCHMARK_SCHEMA)["runs"].values():
        plan = profile, *plan_of(result["config"])
        off.append(slowest_seconds(simulate(*plan)) / summarise(result).seconds - 1)
    page = " ".join((RESULTS.parents[1] / "docs/planning.md").read_text().split())
    assert f"{100 * np.median(np.abs(off)):.1f} % ({name.replace('x', ' x ')})" in page
    assert np.abs(off).max() < 0.205


def plans(ranks: int, per_node: int) -> Iterator[tuple[str, Layout]]:
    """Grids, rings and the other partitions of 16, 64 or 256 ranks."""
    n = int(ranks**0.5)
    for shape in ((n, n), (n // 2, 2 * n), (2 * n, n // 2), (n // 2, n // 2, 4)):
        yield "attention2d", Layout(*shape)
    yield "ring", Layout(ranks, 1)
    yield "ring", Layout(ranks // 4, 1, 4)
    yield "striped ring", Layout(ranks, 1)
    yield "double ring", Layout(ranks // 4, 4)
    yield "triangle", Layout({16: 15, 64: 66, 256: 253}[ranks], 1)
    block = {1: (1, 1), 4: (2, 2), 8: (2, 4)}[per_node]
    nodes = np.arange(ranks) // per_node
    yield "node aware", Layout(n, n, block=block).on_nodes(nodes)


def main() -> None:
    """Print how far the simulator is from SimGrid, by phase of each plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int, nargs="+", choices=(16, 64, 256))
    parser.add_argument("--profiles", default="a100-16x4,a100-4-1nic,h100-8,h100-64x1")
    parser.add_argument("--tokens", default="64,1024", help="of a rank")
    parser.add_argument("--write", help="a file for the results of SimGrid")
    args = parser.parse_args()
    kept = []
    for ranks in args.ranks:
        off = []
        for name in args.profiles.split(","):
            profile = read_machine(RESULTS.parent / "machines" / f"{name}.toml")
            for tokens in map(int, args.tokens.split(",")):
                for mask in (Causal(), Full()):
                    for method, layout in plans(ranks, profile.ranks_per_node):
                        if mask == Full() and not METHODS[method].takes(mask):
                            continue
                        work = Workload(tokens * ranks, 32, 128, 8, mask=mask, backward=True)
                        ours = shared(profile, method, layout, work)
                        least = min(x.max() for x in ours.values())
                        coarse = 1e-4 * least if ranks > 64 else 0.0
                        theirs = simulate(profile, method, layout, work, coarse=coarse)
                        seconds = {x: theirs[x].total.max() for x in ours}
                        off += [abs(ours[x].max() / seconds[x] - 1) for x in ours]
                        shape = layout.rows, layout.cols, layout.heads
                        found = ", ".join(f"{x:.5g} s" for x in seconds.values())
                        far = [f"{100 * x:.2f} %" for x in off[-len(ours) :]]
                        plan = name, tokens, type(mask).__name__, method, shape
                        print(*plan, found, *far, flush=True)
                        if mask == Causal() and layout.nodes is None:
                            kept.append({"method": method, "layout": shape,
                                         "seqlen": work.seqlen, "seconds": seconds})  # fmt: skip
        print(f"{ranks} ranks, {len(off)} phases: median {100 * np.median(off):.2f} %, "
              f"worst {100 * max(off):.2f} %", flush=True)  # fmt: skip
    if args.write:
        with open(args.write, "w") as file:
            file.write("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")


if __name__ == "__main__":
    main()
