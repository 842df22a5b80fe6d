"""The kernel for any GPU: any mask, any dtype, heads of up to 256 elements; see kernels.cu.

It computes blocks that cuDNN does not compute, and checks cuDNN's results.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.devices.cuda import LANES, WARPS, Cuda, kernel_of
from a2d_mpi.devices.protocol import Array
from a2d_mpi.masks.intervals import Intervals

BLOCK_ROWS, HEADDIM_MAX = 16, 256  # as in kernels.cu


class CupyKernel:
    """The kernel of kernels.cu; see `a2d_mpi.kernels.numpy.NumpyKernel`.

    Parameters
    ----------
    dtype : dtype
        Dtype of the tensors; float16 and bfloat16 are computed in float32.
    softmax_scale : float
    device : Cuda
    logit_softcap : float, optional
        c > 0: scaled logits s become ``c tanh(s / c)``.  It is compiled into the kernel, so
        kernels without a soft-cap spend no time on it.
    """

    name = "cupy"

    def __init__(
        self,
        dtype: np.dtype,
        softmax_scale: float,
        device: Cuda,
        logit_softcap: float | None = None,
        **_: Any,
    ) -> None:
        self.device, self.dtype, self.softmax_scale = device, np.dtype(dtype), softmax_scale
        self.logit_softcap = logit_softcap

    def forward(
        self, q: Array, k: Array, v: Array, intervals: Intervals, out: Array, lse: Array, **_: Any
    ) -> None:
        """Write the partial result to `lse` and `out`.

        `out` has the dtype of the tensors or the accumulation dtype.
        """
        if len(q) == 0:
            return
        wide = np.int32(out.dtype != self.dtype)
        problem = self._problem(q, k, v, intervals)
        self._launch("forward", len(q), q, k, v, *problem, out, wide, lse)

    def backward(self, dout, q, k, v, lse, delta, intervals, dq, dk, dv, fresh=False, **_) -> None:
        """Add the block's gradients to dq, dk and dv; overwrite dq, dk and dv if `fresh`."""
        inputs = (dout, q, k, v, lse, delta, *self._problem(q, k, v, intervals))
        new = np.int32(fresh)
        if len(q):
            wide = np.int32(dq.dtype != self.dtype)
            self._launch("backward_q", len(q), *inputs, dq, wide, new)
        if len(k):
            wide = np.int32(dk.dtype != self.dtype)
            self._launch("backward_kv", len(k), *inputs, dk, dv, wide, new)

    def _problem(self, q: Array, k: Array, v: Array, intervals: Intervals) -> tuple:
        ends = self._ends(intervals)
        heads = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        sizes = len(intervals), len(q), len(k), *heads
        return ends, *map(np.int32, sizes), np.float64(self.softmax_scale)

    def _ends(self, intervals: Intervals) -> Array:
        """Return begins and ends of the intervals, (2 intervals, nq) int32, on the device."""
        prepared = intervals.prepared
        if self not in prepared:
            ends = np.stack([x for pair in intervals for x in pair])
            prepared[self] = self.device.upload(ends.astype(np.int32))
        return prepared[self]

    def _launch(self, name: str, rows: int, *args: Array) -> None:
        """Launch the kernel "forward", "backward_q" or "backward_kv" of kernels.cu."""
        q, k, v = args[:3] if name == "forward" else args[1:4]
        widths = q.shape[2], v.shape[2]
        if max(widths) > HEADDIM_MAX:
            got = f"got headdim {widths[0]} and headdim_v {widths[1]}"
            raise ValueError(f"heads can have at most {HEADDIM_MAX} elements on a GPU, {got}")
        heads = k.shape[1] if name == "backward_kv" else q.shape[1]
        padded = d, e = tuple(-(-x // LANES) * LANES for x in widths)
        held = BLOCK_ROWS * (d if name == "forward" else d + e)
        shared = (held + LANES * (max(d, e) + 1)) * compute_dtype(self.dtype).itemsize
        kernel = kernel_of(self.device.index, name, self.dtype, padded, self.logit_softcap)
        if shared > 48 << 10:
            kernel.max_dynamic_shared_size_bytes = shared
        grid = (math.ceil(rows / BLOCK_ROWS), heads)
        kernel(grid, (LANES * WARPS,), args, shared_mem=shared)
