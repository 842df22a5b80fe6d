"""Grids, inputs and plans for the tests of distributed attention."""

from dataclasses import replace
from functools import cache

import numpy as np
from dense import solve, wrong_in
from mpi4py import MPI

from a2d_mpi import (
    Attention2D,
    DoubleRingAttention,
    NodeAwareAttention,
    RingAttention,
    TriangleAttention,
)
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.masks.mask import Causal
from a2d_mpi.planning import cost
from a2d_mpi.planning.memory import buffers

SIZE = MPI.COMM_WORLD.size
GRIDS = {5: [(1, 5)], 6: [(2, 3), (3, 2)]}.get(
    SIZE, [(r, SIZE // r) for r in range(1, SIZE + 1) if SIZE % r == 0]
)
METHODS = [(Attention2D, grid) for grid in GRIDS] + [(RingAttention, GRIDS[-1])]
# In fewer cases: with a head axis, the third number; double rings, whose loops are the ring's.
OTHERS = {
    4: [(DoubleRingAttention, (2, 2)), (Attention2D, (2, 1, 2))],
    6: [
        (DoubleRingAttention, (2, 3)),
        (Attention2D, (1, 3, 2)),
        (Attention2D, (1, 1, 6)),
        (DoubleRingAttention, (3, 1, 2)),
    ],
}.get(SIZE, [(DoubleRingAttention, (SIZE, 1))])
# Grids on which chunks travel in units, or a rank's own is cut.
UNITS = {4: [(2, 2), (1, 4), (2, 1, 2)], 6: [(2, 3), (3, 2), (1, 2, 3)]}.get(SIZE, [(1, SIZE)])


# Name: the class, the grid, its options, and those of the plan.
PLANS = {
    f"{kind.__name__} {'x'.join(map(str, shape))}": (kind, shape, {}, {})
    for kind, shape in METHODS + OTHERS
}
PLANS["in turn"] = Attention2D, METHODS[0][1], {}, {"overlap": False}
NODES = {"nodes": [p // 2 for p in range(SIZE)]}
PLANS["node aware"] = NodeAwareAttention, METHODS[-2][1], NODES, {}
if SIZE in (1, 6):
    PLANS["triangle"] = TriangleAttention, (1, SIZE), {}, {}


def takes(kind, mask):
    """Return True if a class of plans takes a mask."""
    return kind is not TriangleAttention or isinstance(mask, Causal)


def label(method):
    """Return the label of a method and grid in the report of a test."""
    return f"{method[0].__name__}-{'x'.join(map(str, method[1]))}"


NHEADS = 6
SEQLENS = [1, 3, 7, 64, 1009] if SIZE == 4 else [3, 1009]  # the rest of the tests, at one size
TENSORS = ("out", "lse", "dq", "dk", "dv")


@cache
def inputs(seqlen, nheads_kv, headdim, size=1.0, dtype="float32", nheads=NHEADS):
    """Return q, k, v and dout of the whole sequence, float32 numbers that `dtype` can hold.

    The arrays are read-only, because all tests share them.
    """
    rng = np.random.default_rng([seqlen, nheads_kv, headdim])
    q, dout = (rng.standard_normal((seqlen, nheads, headdim), np.float32) for _ in range(2))
    k, v = (rng.standard_normal((seqlen, nheads_kv, headdim), np.float32) for _ in range(2))
    narrow = DTYPES[dtype] if DTYPES[dtype].itemsize == 2 else np.float32
    whole = [x.astype(narrow).astype(np.float32) for x in (q * np.float32(size), k, v, dout)]
    for x in whole:
        x.flags.writeable = False
    return whole


@cache
def expected(mask, config, size):
    """Return float64 results of `inputs`, and the largest errors of a plan; collective."""
    sizes, tokens = (config.seqlen, config.nheads_kv, config.headdim), np.arange(config.seqlen)
    whole = inputs(*sizes, size, config.dtype, config.nheads)
    return solve(whole, mask.dense(tokens, tokens), config, size=size)


def shards(plan, whole):
    """This rank's shards of whole q, k, v and dout, by name."""
    names = ("q", "k", "v", "dout")
    return {x: y[plan.tokens].astype(plan.dtype) for x, y in zip(names, whole)}


def run(plan, q, k, v, dout, upload=np.asarray, download=np.asarray):
    """Return all results of this rank for whole inputs, by way of a device's arrays."""
    q, k, v, dout = (upload(x[plan.tokens].astype(plan.dtype)) for x in (q, k, v, dout))
    out, lse = plan.forward(q, k, v)
    results = (out, lse, *plan.backward(dout, q, k, v, out, lse))
    return dict(zip(TENSORS, map(download, results)))


def failures(plan, found, mask, seqlen, nheads_kv, headdim, size=1.0):
    """Describe the results of this rank that are out of bounds."""
    assert (seqlen, nheads_kv, headdim) == (plan.seqlen, plan.nheads_kv, plan.headdim)
    return wrong_in(plan, found, *expected(mask, replace(plan.config, wire=None), size))


def accounts(plan, backward, calls=1):
    """Describe what is wrong with the traffic or the buffers of a plan.

    After so many forward and, if `backward`, backward calls.
    """
    method, rank, bad = plan.method, plan.grid.comm.rank, []
    sizes = method, plan.layout, plan.problem, rank
    phases = ("forward", "backward") if backward else ("forward",)
    for what, counted, expected in (
        ("bytes", plan.traffic.bytes, plan.predicted_traffic()),
        ("messages", plan.traffic.messages, cost.messages(*sizes)),
    ):
        expected = {
            key: [calls * x for x in both] for key, both in expected.items() if key[0] in phases
        }
        if counted != expected:
            bad.append(f"{counted} {what} but predicted {expected}")
    held = buffers(*sizes, backward)
    counts = plan.problem.queries.counts
    if plan.buffer_bytes > held or (min(counts) > 1 and plan.buffer_bytes < held):
        bad.append(f"{plan.buffer_bytes} bytes of buffers but predicted {held}")
    return bad


def checked(plan):
    """Return the results of this rank, and a description of errors in results, traffic or buffers.

    Of one forward and one backward call, on the usual inputs; the plan is freed.
    """
    sizes = plan.seqlen, plan.nheads_kv, plan.headdim
    found = run(plan, *inputs(*sizes, 1.0, plan.dtype.name, plan.nheads))
    bad = failures(plan, found, plan.mask, *sizes)
    bad += accounts(plan, True)
    plan.free()
    return found, bad


def checked_both_ways(make):
    """Describe errors of a plan with and without overlap, and where the two differ in any bit."""
    (one, bad), (other, more) = (checked(make(overlap=overlap)) for overlap in (True, False))
    return bad + more + [f"{x} differs" for x in TENSORS if one[x].tobytes() != other[x].tobytes()]
