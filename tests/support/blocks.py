"""Blocks of queries and keys for kernels: inputs, exact results, bounds, and what must hold."""

from contextlib import nullcontext
from functools import cached_property
from unittest.mock import patch

import numpy as np
from dense import TENSORS, bounds, out_of_bounds, plain

from a2d_mpi.core.dtypes import DTYPES, compute_dtype
from a2d_mpi.devices.host import HOST
from a2d_mpi.kernels import make_kernel
from a2d_mpi.masks.intervals import Intervals
from a2d_mpi.masks.mask import Causal

# The kernel that "auto" takes: "onednn" on CPUs that have products for it.
BFLOAT16 = make_kernel("auto", HOST, DTYPES["bfloat16"], 1.0).name


def all_blocks(kernel):
    """In this context the kernel "onednn" leaves no block to another kernel for its size."""
    here = kernel.name == "onednn"
    return patch("a2d_mpi.kernels.onednn.LEAST", 0) if here else nullcontext()


def dense(intervals, nk):
    keys = np.arange(nk)
    return sum((keys >= b[:, None]) & (keys < e[:, None]) for b, e in intervals).astype(bool)


def random_intervals(nq, nk, kind, seed=1):
    rng = np.random.default_rng(seed)
    if kind == "full":
        return ((np.zeros(nq, int), np.full(nq, nk)),)
    if kind == "causal":
        return ((np.zeros(nq, int), np.minimum(np.arange(nq) + 1, nk)),)
    if kind == "band":  # the last queries of a long block see no key
        first = np.arange(nq) - 5
        return ((np.clip(first, 0, nk), np.minimum(first + 11, nk)),)
    begin = rng.integers(0, nk + 1, nq)
    end = np.maximum(begin, rng.integers(0, nk + 1, nq))
    if kind == "one":
        return ((begin, end),)
    return ((begin, end), (end, np.minimum(end + 5, nk)))


class Block:
    """Inputs of a kernel's calls, drawn by sizes (nq, nk, heads, KV heads, headdim[, headdim_v]).

    `intervals` may be a kind of `random_intervals`; `change` changes q, k, v and dout in place.
    """

    def __init__(
        self, sizes, dtype, intervals, scale=None, cap=None, size=1.0, seed=0, change=None
    ):
        nq, nk, nheads, nheads_kv, d, *e = sizes
        rng = np.random.default_rng(seed)
        self.dtype = DTYPES[dtype]
        shapes = [(nq, nheads, d), (nq, nheads, *(e or [d]))]
        shapes += [(nk, nheads_kv, d), (nk, nheads_kv, *(e or [d]))]
        q, dout, k, v = (rng.standard_normal(x) for x in shapes)
        given = [q * size, k, v, dout]
        if change:
            change(*given)
        self.inputs = [x.astype(self.dtype) for x in given]
        kind = isinstance(intervals, str)
        self.intervals = Intervals(random_intervals(nq, nk, intervals) if kind else intervals)
        self.visible = dense(self.intervals, nk)
        self.scale, self.cap = d**-0.5 if scale is None else scale, cap
        self.products = None  # the dtype to which a kernel rounds probabilities
        self.exact = plain(self.inputs, self.visible, self.scale, cap)
        for x in self.inputs:
            x.flags.writeable = False

    @cached_property
    def bounds(self):
        given = self.inputs, self.visible, self.scale, self.cap, None, self.exact, self.dtype
        return bounds(*given, products=self.products)

    def poisoned(self):
        """Return inputs that are NaN in masked rows, and in keys that nobody sees."""
        q, k, v, dout = (x.copy() for x in self.inputs)
        q[~self.visible.any(1)] = dout[~self.visible.any(1)] = np.nan
        k[~self.visible.any(0)] = v[~self.visible.any(0)] = np.nan
        return q, k, v, dout

    def run(self, kernel, inputs=None, device=None, wide=True, fresh=False, **options):
        """Return all results of a kernel; the backward pass gets the exact statistics.

        Without `fresh`, gradients are added to zeros.  With `device`, which is CuPy, to 7.
        """
        wide_dtype = compute_dtype(self.dtype)
        upload, download = (device.asarray, device.asnumpy) if device else (np.asarray,) * 2
        q, k, v, dout = given = [upload(x) for x in inputs or self.inputs]
        intervals = Intervals(self.intervals)  # they keep what queued launches read
        kept, start = wide_dtype if wide else self.dtype, 7 if device or fresh else 0
        out, *gradients = (upload(np.full(x.shape, start, kept)) for x in (dout, q, k, v))
        lse = upload(np.full(q.shape[:2], 7, wide_dtype))
        call = all_blocks(kernel)
        with call:
            kernel.forward(q, k, v, intervals, out, lse, **options)
        delta = (np.asarray(self.inputs[3], float) * self.exact["out"]).sum(-1)
        if inputs is not None:
            delta[~self.visible.any(1)] = np.nan
        statistics = [upload(x.astype(wide_dtype)) for x in (self.exact["lse"], delta)]
        with call:
            kernel.backward(
                dout, *given[:3], *statistics, intervals, *gradients, fresh=fresh, **options
            )
        found = dict(zip(TENSORS, map(download, (out, lse, *gradients))))
        return found if fresh else found | {x: found[x] - start for x in ("dq", "dk", "dv")}

    def wrong(self, found, slack=0):
        """Return what is out of bounds."""
        largest = {x: y + slack for x, y in self.bounds.items()}
        return out_of_bounds(found, self.exact, largest)


def assert_kernel(name, dtype, kind, case, shape):
    """A kernel of the host is right, masked rows are silent, and what nobody sees may be NaN.

    `case`: heads, KV heads and headdims; the size of q; the soft-cap.
    """
    heads, size, cap = case
    block = Block((*shape, *heads), dtype, kind, cap=cap, size=size)
    options = {"logit_softcap": cap} if cap else {}
    kernel = make_kernel(name, HOST, block.dtype, block.scale, **options)
    assert kernel.name == name
    block.products = getattr(kernel, "product_dtype", None)
    found = block.run(kernel)
    assert not block.wrong(found)
    masked, unseen = ~block.visible.any(1), ~block.visible.any(0)
    assert not found["out"][masked].any() and np.isneginf(found["lse"][masked]).all()
    assert not found["dq"][masked].any() and not found["dk"][unseen].any()
    padded = block.run(kernel, block.poisoned())
    assert all(np.array_equal(x, padded[y]) for y, x in found.items())
    # The way that takes logits of any size, and results that are not added to what was there.
    kernel._bounded = lambda *_: False
    assert not block.wrong(block.run(kernel, fresh=True))


def in_parts(block, parts, kernel, device, sums=np.float32):
    """Return results of a causal block in parts x parts blocks, as plans merge and add them.

    Partial outs are rounded to the block's dtype, gradients are summed in the dtype `sums`.
    """
    q, k, v, dout = map(device.upload, block.inputs)
    tokens = np.arange(len(q))
    pieces = [slice(x[0], x[-1] + 1) for x in np.array_split(tokens, parts)]
    pairs = [
        (rows, keys, Causal().intervals(tokens[rows], tokens[keys]))
        for i, rows in enumerate(pieces)
        for keys in pieces[: i + 1]
    ]  # which keep what queued launches read

    def zeros(like, dtype):
        return device.upload(np.zeros(like.shape, dtype))

    out, rest = zeros(dout, np.float32), device.upload(np.zeros(q.shape[:2], np.float32))
    lse = device.upload(np.full(q.shape[:2], -np.inf, np.float32))
    for rows, keys, seen in pairs:
        partial = zeros(dout[rows], block.dtype), zeros(lse[rows], np.float32)
        kernel.forward(q[rows], k[keys], v[keys], seen, *partial)
        device.merge(out[rows], lse[rows], rest[rows], *partial)
    final, gradients = zeros(dout, block.dtype), [zeros(x, sums) for x in (q, k, v)]
    device.put(final, out)
    delta = device.delta(dout, final)
    for rows, keys, seen in pairs:
        places = rows, keys, keys
        some = [zeros(x[y], np.float32) for x, y in zip((q, k, v), places)]
        given = dout[rows], q[rows], k[keys], v[keys], lse[rows], delta[rows]
        kernel.backward(*given, seen, *some)
        for total, place, x in zip(gradients, places, some):
            device.put(total[place], x, add=True)
    found = dict(zip(TENSORS, map(device.download, (final, lse, *gradients))))
    return found | {x: found[x].astype(block.dtype) for x in ("dq", "dk", "dv")}


def plain_kernel(cupy, block):
    """Return the plain kernel of a GPU for a block."""
    from a2d_mpi.devices.cuda import Cuda
    from a2d_mpi.kernels.cupy import CupyKernel

    kernel = CupyKernel(block.dtype, block.scale, Cuda.current())
    kernel.logit_softcap = block.cap
    return kernel


WAYS = (True, False), (False, True)


def gpu_failures(cupy, kernel, block, poisoned=False, slack=0, ways=WAYS):
    """Return what is out of bounds in results that are wide or not, and fresh or added to 7."""
    bad, given = [], block.poisoned() if poisoned else None
    for wide, fresh in ways:
        found = block.run(kernel, given, cupy, wide, fresh)
        eps = 0 if fresh else float(np.finfo(compute_dtype(block.dtype)).eps)
        bad += [(wide, fresh, x) for x in block.wrong(found, slack + 7 * eps)]
    return bad
