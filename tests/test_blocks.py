"""Placed blocks: results, bytes and buffers; balance and bytes against grids."""

import numpy as np
import pytest
from cases import checked
from helpers import assert_all
from oracles import documents, heavy_tailed

from a2d_mpi import Causal
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import Layout
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.schedules import problem_of, write
from a2d_mpi.schedules.steps import Attend
from a2d_mpi.sharding.assigned import Assigned

DOCUMENTS = "causal_document:0,3,3,50,90,97"


@pytest.mark.mpi
@pytest.mark.parametrize(
    "mask, heads", [("causal", 1), (DOCUMENTS, 1), ("share_question:seed=1", 2), ("full", 2)]
)
def test_results(comm, grid_of, mask, heads):
    """Results equal float64 with and without overlap; bytes and buffers are as predicted."""
    heads = heads if comm.size % heads == 0 else 1
    grid, bad = grid_of(comm.size // heads, 1, heads), []
    for nheads_kv, dtype, overlap in ((6, "float32", True), (1, "float64", False)):
        sizes = {"seqlen": 97, "nheads": 6, "nheads_kv": nheads_kv, "headdim": 16}
        plan = make_plan(
            "blocks", grid, make_mask(mask, 97), dtype=dtype, overlap=overlap, **sizes
        )
        bad += checked(plan)[1]
    assert_all(comm, not bad, "; ".join(bad))


@pytest.mark.parametrize("mask", [Causal(), documents(heavy_tailed(256, 2, 8))])
@pytest.mark.parametrize("ranks", [3, 8])
def test_every_pair_once(mask, ranks):
    config = AttentionConfig(256, 4, 8, 2)
    sizes = problem_of("blocks", Layout(ranks, 1), config, mask)
    times = np.zeros((256, 256), int)
    for rank in range(ranks):
        (program,) = write("blocks", "forward", Layout(ranks, 1), sizes, rank)
        for step in program.steps:
            if isinstance(step, Attend):
                q, k = program.tokens(step.queries), program.tokens(step.keys)
                times[np.ix_(q, k)] += program.mask.dense(q, k)
    tokens = np.arange(256)
    assert (times == mask.dense(tokens, tokens)).all()


def test_assigned_pairs():
    mask, bounds = Causal(), np.array([0, 3, 7, 10])
    found = Assigned(mask, bounds, np.array([[2, 0], [1, 1], [2, 1]]))
    tokens, block = np.arange(10), np.repeat([0, 1, 2], [3, 4, 3])
    pair = {(2, 0), (1, 1), (2, 1)}
    wanted = np.array([[(a, b) in pair for b in block] for a in block])
    assert (found.dense(tokens, tokens) == (wanted & mask.dense(tokens, tokens))).all()
