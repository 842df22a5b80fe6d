"""Machines for the tests of predicted times."""

from helpers import ROOT

from a2d_mpi.planning.machine import KernelModel, Link, Machine
from a2d_mpi.planning.profile import read_machine

KERNEL = KernelModel(1e11, call=1e-5)
SLOW, FAST = Link(1e6, latency=1e-3, overhead=1e-5), Link(1e9, latency=1e-5)
RESULTS, MACHINES = ROOT / "data" / "results", ROOT / "data" / "machines"
H100, A100 = (read_machine(MACHINES / f"{x}.toml") for x in ("h100-64x1", "a100-16x4"))


def machine(between=SLOW, inside=FAST, name="test", **others):
    """Return a machine of slow links between nodes of one rank, and one kernel."""
    kernels = {"float32": {"forward": KERNEL, "backward": KERNEL}}
    return Machine(name, inside, between, kernels, **{"ranks_per_node": 1, **others})
