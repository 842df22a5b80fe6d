"""The figure that shows when 2-D attention pays off, and its data."""

import pytest
from helpers import ROOT

from a2d_mpi.figures import crossover_plots
from a2d_mpi.figures.crossover_plots import simulated
from a2d_mpi.planning.profile import read_machine

DATA = ROOT / "data/results/crossover"


@pytest.mark.thorough
def test_simulated_points(monkeypatch):
    """The ratio grows with the tokens, and the gain falls to one."""
    monkeypatch.setattr(crossover_plots, "TOKENS", [1 << 15, 1 << 22])
    machine = read_machine(ROOT / "data/machines/h100-64x1.toml").with_ranks_per_node(1)
    few, many = simulated(machine)
    assert few.ratio < 0.2 and many.ratio > 5
    assert few.gain("square grid 4 x 4") > 2 and many.gain("square grid 4 x 4") < 1.1
    for p in (few, many):
        assert p.seconds["the planner's pick"] <= min(p.seconds.values())
