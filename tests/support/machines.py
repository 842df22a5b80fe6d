"""Machines for the tests of predicted times."""

from collections.abc import Mapping

from helpers import ROOT

from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.planning.candidate import Candidate
from a2d_mpi.planning.machine import KernelModel, Link, Machine
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules.method import METHODS

KERNEL = KernelModel(1e11, call=1e-5)
SLOW, FAST = Link(1e6, latency=1e-3, overhead=1e-5), Link(1e9, latency=1e-5)
RESULTS, MACHINES = ROOT / "data" / "results", ROOT / "data" / "machines"
H100, A100 = (read_machine(MACHINES / f"{x}.toml") for x in ("h100-64x1", "a100-16x4"))


def machine(between=SLOW, inside=FAST, name="test", **others):
    """Return a machine of slow links between nodes of one rank, and one kernel."""
    kernels = {"float32": {"forward": KERNEL, "backward": KERNEL}}
    return Machine(name, inside, between, kernels, **{"ranks_per_node": 1, **others})


def slowest_seconds(phases):
    """Return the seconds of the slowest rank of each phase, summed over the phases."""
    return sum(float(phase.total.max()) for phase in phases.values())


def planned(machine, method, layout, work):
    """Return the candidate of one plan, simulated."""
    found = Candidate(machine, method, layout, [(1, work)])
    while found.refine():
        pass
    return found


def plan_of(c: Mapping[str, object]) -> tuple[str, Layout, Workload]:
    """Return method, layout and workload of a measured result."""
    sizes = (int(c[x]) for x in ("seqlen", "nheads", "headdim", "nheads_kv"))
    options = {"dtype": c["dtype"], **{x: bool(c[x]) for x in ("backward", "overlap")}}
    work = Workload(*sizes, mask=make_mask(c["mask"], int(c["seqlen"])), **options)
    nodes = None
    if METHODS[c["method"]].knows_nodes:
        nodes = tuple(int(x) for x in c["nodes"].split())
    block = tuple(int(x) for x in c["block"].split("x"))
    shape = (int(c[x]) for x in ("rows", "cols", "heads"))
    return c["method"], Layout(*shape, c["order"], block, nodes), work
