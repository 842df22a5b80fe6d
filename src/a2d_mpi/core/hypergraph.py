"""A start of an assignment by hypergraph partitioning with mtkahypar, where it is installed."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import numpy as np

from a2d_mpi.core.assignment import Assignment
from a2d_mpi.core.demand import Demand
from a2d_mpi.core.starts import contiguous

_EVEN = 0.03


def partitioned(demand: Demand, ranks: int) -> Assignment:
    """Place pairs of blocks by hypergraph partitioning.

    The vertices are the pairs of blocks, weighed by their visible pairs.  A net joins all pairs of
    one block of queries, and weighs q with the partial out; another joins those of one block of
    keys, and weighs k with v.

    Raises
    ------
    ValueError
        If mtkahypar is not installed.
    """
    mtkahypar, starter = _library()
    context = starter.context_from_preset(mtkahypar.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(ranks, _EVEN, mtkahypar.Objective.KM1)
    context.logging = False
    mtkahypar.set_seed(0)
    blocks = len(demand.tokens)
    nets, weights = [], []
    for block, share, classes in (
        (demand.row, 2.0, demand.queries),
        (demand.col, 2.0 * demand.kv_share, demand.keys),
    ):
        weight = share * np.bincount(classes.block, classes.weight, blocks)
        for b in range(blocks):
            pairs = np.flatnonzero(block == b)
            if len(pairs) > 1:
                nets.append(pairs.tolist())
                weights.append(max(1, round(weight[b])))
    # Vertex weights are 32 bits wide.
    unit = max(1.0, demand.visible.sum() / 2**28)
    work = np.maximum(1, np.rint(demand.visible / unit)).astype(np.int64).tolist()
    graph = starter.create_hypergraph(context, len(work), len(nets), nets, work, weights)
    rank = np.array(graph.partition(context).get_partition(), np.int64)
    return Assignment(demand, ranks, contiguous(demand, ranks), rank)


@lru_cache(maxsize=1)
def _library() -> tuple[ModuleType, object]:
    """Import and start mtkahypar once, with one thread, so that its results repeat."""
    try:
        import mtkahypar
    except ImportError:
        raise ValueError(
            "partitioner 'hypergraph' wants mtkahypar: pip install mtkahypar"
        ) from None
    return mtkahypar, mtkahypar.initialize(1)
