"""Blocks of queries and keys for kernels: inputs, exact results, and bounds."""

from functools import cached_property

import numpy as np
from dense import TENSORS, bounds, out_of_bounds, plain

from a2d_mpi.core.dtypes import DTYPES, compute_dtype
from a2d_mpi.masks.intervals import Intervals


def dense(intervals, nk):
    keys = np.arange(nk)
    return sum((keys >= b[:, None]) & (keys < e[:, None]) for b, e in intervals).astype(bool)


def random_intervals(nq, nk, kind, seed=1):
    rng = np.random.default_rng(seed)
    if kind == "full":
        return ((np.zeros(nq, int), np.full(nq, nk)),)
    if kind == "causal":
        return ((np.zeros(nq, int), np.minimum(np.arange(nq) + 1, nk)),)
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
        self.intervals = random_intervals(nq, nk, intervals) if kind else intervals
        self.visible = dense(self.intervals, nk)
        self.scale, self.cap = d**-0.5 if scale is None else scale, cap
        self.exact = plain(self.inputs, self.visible, self.scale, cap)
        for x in self.inputs:
            x.flags.writeable = False

    @cached_property
    def bounds(self):
        return bounds(
            self.inputs, self.visible, self.scale, self.cap, None, self.exact, self.dtype
        )

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
        intervals = Intervals.of(self.intervals)  # they keep what queued launches read
        kept, start = wide_dtype if wide else self.dtype, 7 if device or fresh else 0
        out, *gradients = (upload(np.full(x.shape, start, kept)) for x in (dout, q, k, v))
        lse = upload(np.full(q.shape[:2], 7, wide_dtype))
        kernel.forward(q, k, v, intervals, out, lse, **options)
        delta = (np.asarray(self.inputs[3], float) * self.exact["out"]).sum(-1)
        if inputs is not None:
            delta[~self.visible.any(1)] = np.nan
        statistics = [upload(x.astype(wide_dtype)) for x in (self.exact["lse"], delta)]
        kernel.backward(
            dout, *given[:3], *statistics, intervals, *gradients, fresh=fresh, **options
        )
        found = dict(zip(TENSORS, map(download, (out, lse, *gradients))))
        return found if fresh else found | {x: found[x] - start for x in ("dq", "dk", "dv")}

    def wrong(self, found, slack=0):
        """Return what is out of bounds."""
        largest = {x: y + slack for x, y in self.bounds.items()}
        return out_of_bounds(found, self.exact, largest)
