"""Grids, inputs and float64 results for the tests of distributed attention.

The float64 results do not depend on the number of ranks.  With ``A2D_TEST_RESULTS=FOLDER`` runs of
the same version of the tests share them in this folder.
"""

import hashlib
import os
import pickle
from functools import cache
from pathlib import Path

import numpy as np
from helpers import bounds_for, distance
from mpi4py import MPI

from a2d_mpi import Attention2D, DoubleRingAttention, RingAttention
from a2d_mpi.core import reference
from a2d_mpi.core.dtypes import DTYPES
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
def expected(mask, *sizes):
    """Return float64 results, and the largest errors of float32 kept in a dtype.

    `sizes` are all arguments of `inputs`.
    """
    world, tokens = MPI.COMM_WORLD, np.arange(sizes[0])
    visible = mask.dense(tokens, tokens)
    # Only rank 0 need see the folder.
    path = found = None
    if world.rank == 0 and "A2D_TEST_RESULTS" in os.environ:
        name = hashlib.sha256(repr(sizes).encode() + np.packbits(visible).tobytes()).hexdigest()
        path = Path(os.environ["A2D_TEST_RESULTS"], name)
        found = pickle.loads(path.read_bytes()) if path.exists() else None
    found = world.bcast(found) or computed(visible, *sizes)
    if path and not path.exists():
        path.with_suffix(".tmp").write_bytes(pickle.dumps(found))
        path.with_suffix(".tmp").rename(path)
    return found


def computed(visible, seqlen, nheads_kv, headdim, size, dtype, nheads):
    """Compute `expected` on all ranks together."""
    world, kept, group = MPI.COMM_WORLD, DTYPES[dtype], nheads // nheads_kv
    q, k, v, dout = inputs(seqlen, nheads_kv, headdim, size, dtype, nheads)
    results = []
    # Orders of summation: one error in float32 is one draw of what rounding may do, and with huge
    # logits, where few keys count, draws differ much.
    orders = [np.random.default_rng(i).permutation(headdim) for i in range(5 if size > 1 else 1)]
    for kind, order in [(np.float64, orders[0]), *((np.float32, order) for order in orders)]:
        back = np.argsort(order)
        heads = {}
        # Every rank does its share of the heads.
        for h in range(world.rank, nheads, world.size):
            g = h // group
            x = [y[:, [i]][..., order] for y, i in ((q, h), (k, g), (v, g))]
            dy = dout[:, [h]][..., order]
            out, lse = reference.attention(*x, visible, headdim**-0.5, kind)
            if kind == np.float32:
                out = out.astype(kept).astype(kind)
            delta = (dy.astype(kind) * out).sum(-1)
            gradients = reference.attention_backward(
                dy, *x, lse, delta, visible, headdim**-0.5, kind
            )
            heads[h] = (out[..., back], lse, *(y[..., back] for y in gradients))
        everyone = {h: x for part in world.allgather(heads) for h, x in part.items()}
        whole = [np.concatenate(x, axis=1) for x in zip(*(everyone[h] for h in range(nheads)))]
        if group > 1:
            whole[3:] = [x.reshape(seqlen, nheads_kv, group, -1).sum(2) for x in whole[3:]]
        results.append(dict(zip(TENSORS, whole)))
    exact, *plain = results
    errors = [
        {x: distance(y if x == "lse" else y.astype(kept), exact[x]) for x, y in z.items()}
        for z in plain
    ]
    return exact, {x: max(error[x] for error in errors) for x in TENSORS}


@cache
def bounds(dtype, mask, *sizes):
    """Return the largest error that each result of a plan in `dtype` may have."""
    exact, same = expected(mask, *sizes)
    headdim, size = sizes[2:4]
    if size > 1:
        # Huge logits are rounded in the forward pass and again, otherwise, in the backward pass:
        # two draws of the error that counts, where the dense computation makes one.
        same = {x: error * 2**0.5 for x, error in same.items()}
    return bounds_for(dtype, headdim**-0.5, inputs(*sizes), exact, same)


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
    # One reference serves float32 and float64: float32 inputs are exact in both.
    dtype = "float32" if plan.dtype.itemsize > 2 else plan.dtype.name
    sizes = seqlen, nheads_kv, headdim, size, dtype, plan.nheads
    exact, largest = expected(mask, *sizes)[0], bounds(plan.dtype, mask, *sizes)
    dtypes = {x: plan.compute_dtype if x == "lse" else plan.dtype for x in TENSORS}
    errors = {x: distance(found[x], exact[x][plan.tokens]) for x in TENSORS}
    return [
        f"{x}: {errors[x]:.2e} > {largest[x]:.2e} (headdim {headdim}, kv {nheads_kv})"
        for x in TENSORS
        if not errors[x] <= largest[x] or found[x].dtype != dtypes[x]
    ]


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
