"""Grids that know their nodes: results, and what crosses the network, by other means."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cases import NHEADS, SIZE, TENSORS, checked, checked_both_ways, inputs, run
from helpers import assert_all, distance
from hypothesis import given
from hypothesis import strategies as st

from a2d_mpi import Attention2D, Causal, Full, NodeAwareAttention, ProcessGrid
from a2d_mpi.core import chunks
from a2d_mpi.core.config import PHASES, Workload
from a2d_mpi.core.sizes import Layout, UnlikeRanks
from a2d_mpi.planning import cost
from a2d_mpi.planning.memory import most_memory, peak_memory
from a2d_mpi.planning.planner import candidates, layouts
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import METHODS, node_aware, write, write_all
from a2d_mpi.schedules.steps import Merge

A100 = read_machine(Path(__file__).parents[1] / "data" / "machines" / "a100-16x4.toml")
mpi = pytest.mark.mpi(min_size=4)
# Grids, with heads, and the node of every rank: 1, 2 and 4 ranks a node, and uneven ones.
NODES = {
    4: [
        ((1, 4), (0, 0, 1, 1)),
        ((4, 1), (0, 1, 1, 1)),
        ((2, 2), (0, 0, 1, 1)),
        ((2, 2, 1, "rcu", (2, 1)), (7, 7, 7, 7)),
        ((1, 2, 2), (0, 1, 0, 1)),
        ((1, 4, 1, "ucr"), (2, 0, 0, 0)),
    ],
    6: [
        ((1, 6), (0, 0, 1, 1, 2, 2)),
        ((6, 1), (0, 1, 1, 1, 2, 2)),
        ((2, 3), (0, 1, 0, 0, 1, 1)),
        ((1, 6, 1, "rcu", (1, 2)), (0, 0, 0, 0, 1, 1)),
    ],
}.get(SIZE, [])


@mpi
@pytest.mark.multirank
@pytest.mark.parametrize("shape, nodes", NODES, ids=str)
def test_results(comm, monkeypatch, shape, nodes):
    """Against float64, with and without overlap; counted, repeated, and cut in two chunks."""
    grid, bad = ProcessGrid(comm, *shape, nodes=nodes), []
    make = partial(NodeAwareAttention, grid, nheads=NHEADS, headdim=16)
    for mask, seqlen, nheads_kv, dtype in (
        (Causal(), 97, NHEADS, "float32"),
        (Full(), 97, 2, "float64"),
        (Causal(), 3, 1, "float64"),
        (Causal(), 97, 1, "bfloat16"),
        (Full(), 64, NHEADS, "float16"),
    ):
        if nheads_kv % grid.heads and grid.heads % nheads_kv:
            continue
        plan = partial(make, mask=mask, seqlen=seqlen, nheads_kv=nheads_kv, dtype=dtype)
        bad += checked_both_ways(plan)
    monkeypatch.setattr(chunks, "GRAIN", 4)
    bad += checked_both_ways(partial(make, mask=Causal(), seqlen=101, nheads_kv=2))
    plan, plain = make(mask=Causal(), seqlen=97), Attention2D(grid, Causal(), seqlen=97,
                                                              nheads=NHEADS, headdim=16)  # fmt: skip
    first, again, other = (run(x, *inputs(97, NHEADS, 16)) for x in (plan, plan, plain))
    bad += [f"{x} does not repeat" for x in TENSORS if first[x].tobytes() != again[x].tobytes()]
    bad += [f"{x} is not the grid's" for x in TENSORS if distance(first[x], other[x]) > 1e-5]
    totals = [sum(x[1] for x in p.traffic.bytes.values()) for p in (plan, plan, plain)]
    if len(set(nodes)) in (1, comm.size) and totals[0] != 2 * totals[2]:
        bad.append(f"{totals} bytes")
    grid.free()
    assert_all(comm, not bad, "; ".join(bad))
