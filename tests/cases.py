"""Grids, inputs and float64 results for the tests of distributed attention."""

from functools import cache

import numpy as np
from helpers import bounds_for, distance
from mpi4py import MPI

from a2d_mpi import Attention2D, DoubleRingAttention, RingAttention, reference
from a2d_mpi.backend import DTYPES

SIZE = MPI.COMM_WORLD.size
GRIDS = {5: [(1, 5)], 6: [(2, 3), (3, 2)]}.get(
    SIZE, [(r, SIZE // r) for r in range(1, SIZE + 1) if SIZE % r == 0]
)
METHODS = [(Attention2D, grid) for grid in GRIDS] + [(RingAttention, GRIDS[-1])]
# Double rings have the grid's rows for inner rings; the third number is that of a head axis.
METHODS += {
    4: [(DoubleRingAttention, (2, 2)), (Attention2D, (2, 1, 2))],
    5: [(DoubleRingAttention, (1, 5))],
    6: [
        (DoubleRingAttention, (2, 3)),
        (Attention2D, (1, 3, 2)),
        (Attention2D, (1, 1, 6)),
        (RingAttention, (2, 1, 3)),
    ],
}.get(SIZE, [])
IDS = [f"{method.__name__}-{'x'.join(map(str, grid))}" for method, grid in METHODS]
NHEADS = 6
TENSORS = ("out", "lse", "dq", "dk", "dv")


def inputs(seqlen, nheads_kv, headdim, size=1.0, dtype="float32", nheads=NHEADS):
    """q, k, v, dout of the whole sequence, float32, but no finer than `dtype` can hold."""
    rng = np.random.default_rng([seqlen, nheads_kv, headdim])
    q, dout = (rng.standard_normal((seqlen, nheads, headdim), np.float32) for _ in range(2))
    k, v = (rng.standard_normal((seqlen, nheads_kv, headdim), np.float32) for _ in range(2))
    narrow = DTYPES[dtype] if DTYPES[dtype].itemsize == 2 else np.float32
    return [x.astype(narrow).astype(np.float32) for x in (q * np.float32(size), k, v, dout)]


@cache
def expected(mask, seqlen, nheads_kv, headdim, size=1.0, dtype="float32", nheads=NHEADS):
    """Float64 results, and the largest errors of float32 ones kept in `dtype`, by tensor."""
    world, kept = MPI.COMM_WORLD, DTYPES[dtype]
    q, k, v, dout = inputs(seqlen, nheads_kv, headdim, size, dtype, nheads)
    visible, group = mask.dense(np.arange(seqlen), np.arange(seqlen)), nheads // nheads_kv
    results = {}
    for kind in (np.float64, np.float32):
        heads = {}
        # Every rank does its share of the heads.
        for h in range(world.rank, nheads, world.size):
            x = (q[:, [h]], k[:, [h // group]], v[:, [h // group]])
            out, lse = reference.attention(*x, visible, headdim**-0.5, kind)
            if kind == np.float32:
                out = out.astype(kept).astype(kind)
            delta = (dout[:, [h]].astype(kind) * out).sum(-1)
            gradients = reference.attention_backward(
                dout[:, [h]], *x, lse, delta, visible, headdim**-0.5, kind
            )
            heads[h] = (out, lse, *gradients)
        everyone = {h: x for part in world.allgather(heads) for h, x in part.items()}
        whole = [np.concatenate(x, axis=1) for x in zip(*(everyone[h] for h in range(nheads)))]
        if group > 1:
            whole[3:] = [x.reshape(seqlen, nheads_kv, group, -1).sum(2) for x in whole[3:]]
        results[kind] = dict(zip(TENSORS, whole))
    exact, plain = results[np.float64], results[np.float32]
    stored = {x: y if x == "lse" else y.astype(kept) for x, y in plain.items()}
    return exact, {x: distance(stored[x], exact[x]) for x in TENSORS}


def run(plan, q, k, v, dout, upload=np.asarray, download=np.asarray):
    """All results of this rank for whole inputs, by way of a device's arrays."""
    q, k, v, dout = (upload(x[plan.tokens].astype(plan.dtype)) for x in (q, k, v, dout))
    out, lse = plan.forward(q, k, v)
    results = (out, lse, *plan.backward(dout, q, k, v, out, lse))
    return dict(zip(TENSORS, map(download, results)))


def failures(plan, found, mask, seqlen, nheads_kv, headdim, size=1.0):
    """What is out of bounds on this rank, in words."""
    # One reference serves float32 and float64: float32 inputs are exact in both.
    dtype = "float32" if plan.dtype.itemsize > 2 else plan.dtype.name
    exact, same = expected(mask, seqlen, nheads_kv, headdim, size, dtype, plan.nheads)
    whole = inputs(seqlen, nheads_kv, headdim, size, dtype, plan.nheads)
    bounds = bounds_for(plan.dtype, headdim**-0.5, whole, exact, same)
    dtypes = {x: plan.compute_dtype if x == "lse" else plan.dtype for x in TENSORS}
    errors = {x: distance(found[x], exact[x][plan.tokens]) for x in TENSORS}
    return [
        f"{x}: {errors[x]:.2e} > {bounds[x]:.2e} (headdim {headdim}, kv {nheads_kv})"
        for x in TENSORS
        if not errors[x] <= bounds[x] or found[x].dtype != dtypes[x]
    ]
