"""Packed documents of many batches need few graphs of cuDNN, and little added work."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import deeper

from a2d_mpi import Documents
from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.layout import Layout
from a2d_mpi.kernels.shapes import TILE
from a2d_mpi.schedules.steps import KernelCall
from a2d_mpi.schedules.writing import problem_of, write

SEQLEN, SHORTEST, LONGEST = 65536, 64, 16384


def batch(rng):
    """Return a mask of documents whose lengths have the Pareto distribution of index 1."""
    lengths = []
    while sum(lengths) < SEQLEN:
        share = rng.random() * (1 - SHORTEST / LONGEST)
        lengths.append(int(SHORTEST / (1 - share)))
    return Documents(np.minimum(np.cumsum([0, *lengths]), SEQLEN), causal=True)


def kernel_calls(mask):
    """Return the sizes and intervals of the kernel calls of 2 x 2 ranks, and whether backward."""
    config, layout = AttentionConfig(SEQLEN, 16, 128, dtype="bfloat16"), Layout(2, 2)
    problem = problem_of("attention2d", layout, config, mask, None)
    for rank in range(layout.size):
        for backward, phase in enumerate(PHASES):
            for program in write("attention2d", phase, layout, problem, rank):
                for step in program.steps:
                    if isinstance(step, KernelCall):
                        q, k = program.tokens(step.queries), np.sort(program.tokens(step.keys))
                        yield len(q), len(k), mask.intervals(q, k), bool(backward)


def tiles(call):
    """Count the tiles that cuDNN computes in a launch; it skips what its own masks hide."""
    block = call.launch.block
    nq, nk = (x.stop - x.start for x in (call.rows, call.keys))
    if block.shape == "general":
        nq, nk = block.nq, block.nk
    last = np.arange(TILE, nq + TILE, TILE)  # the end of each tile's queries
    seen = np.minimum(last + nk - nq, nk) if block.shape == "causal" else 0 * last + nk
    return int((-(-seen // TILE)).sum())


@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
@pytest.mark.parametrize("batches", deeper([100, 10], [10]))
def test_graphs_of_packed_documents(cupy, batches):
    """At most 24 graphs; launches of exactly the runs' sizes would need thousands."""
    from graphs import HostGraphs

    from a2d_mpi.kernels.cudnn_calls import CallMaker

    device = SimpleNamespace(capability=(9, 0), upload=np.asarray, download=np.asarray)
    plain = SimpleNamespace(
        device=device, dtype=np.dtype("float16"), softmax_scale=1.0, logit_softcap=None
    )
    makers = {x: CallMaker(plain, HostGraphs()) for x in (False, True)}
    work, launches, rows = np.zeros((3, 2), int)
    rng = np.random.default_rng(0)
    for _ in range(batches):
        for nq, nk, intervals, backward in kernel_calls(batch(rng)):
            q, v = (np.broadcast_to(np.float16(0), (n, 16, 128)) for n in (nq, nk))
            for varying, maker in makers.items():
                intervals.varying, intervals.prepared = varying, {}
                for call in maker.get(intervals, q, v, 16, backward).calls:
                    if call.launch is not None:
                        work[int(varying)] += tiles(call)
                        launches[int(varying)] += 1
                        rows[int(varying)] += call.launch.block.nq + call.launch.block.nk
    exact, rounded = (len(makers[x].graphs.built) for x in (False, True))
    print(f"{batches} batches: {rounded} graphs, {exact} with exact sizes; {launches} launches,")
    print(f"work {work[1] / work[0]:.4f}, rows of tensors {rows[1] / rows[0]:.2f}")
    assert rounded <= 24 < 100 < exact
    assert work[1] <= 1.15 * work[0]
