"""The kernel for any GPU: any mask, any dtype, headdims up to 256; see kernels.cu.

It computes blocks that cuDNN does not compute, and checks cuDNN's results.
"""

from __future__ import annotations

import math

import numpy as np

from a2d_mpi.devices.cuda import BLOCK_ROWS, HEADDIM_MAX, Cuda
from a2d_mpi.devices.protocol import Array
from a2d_mpi.masks.intervals import Interval, Intervals


class CupyKernel:
    """The kernel of kernels.cu; see `a2d_mpi.kernels.numpy.NumpyKernel`.

    Parameters
    ----------
    device : Cuda
    dtype : dtype
        Dtype of the tensors; float16 and bfloat16 are computed in float32.
    softmax_scale : float
    logit_softcap : float, optional
        c > 0: scaled logits s become ``c tanh(s / c)``.  It is compiled into the kernel, so
        kernels without a soft-cap spend no time on it.
    """

    name = "cupy"

    def __init__(
        self,
        device: Cuda,
        dtype: np.dtype,
        softmax_scale: float,
        logit_softcap: float | None = None,
    ) -> None:
        self.device, self.dtype, self.softmax_scale = device, np.dtype(dtype), softmax_scale
        self.logit_softcap = logit_softcap

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        intervals: tuple[Interval, ...],
        out: Array,
        lse: Array,
        careful: bool = False,
        largest: Array | None = None,
    ) -> None:
        """Write the partial result to `lse` and `out`.

        `out` has the dtype of the tensors or the accumulation dtype.
        """
        if len(q) == 0:
            return
        wide = np.int32(out.dtype != self.dtype)
        self._launch("forward", len(q), q, k, v, *self._problem(q, k, intervals), out, wide, lse)

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        lse: Array,
        delta: Array,
        intervals: tuple[Interval, ...],
        dq: Array,
        dk: Array,
        dv: Array,
        fresh: bool = False,
        careful: bool = False,
        any_delta: bool = False,
    ) -> None:
        """Add the block's gradients to dq, dk and dv; overwrite dq, dk and dv if `fresh`."""
        inputs = (dout, q, k, v, lse, delta, *self._problem(q, k, intervals))
        new = np.int32(fresh)
        if len(q):
            wide = np.int32(dq.dtype != self.dtype)
            self._launch("backward_q", len(q), *inputs, dq, wide, new)
        if len(k):
            wide = np.int32(dk.dtype != self.dtype)
            self._launch("backward_kv", len(k), *inputs, dk, dv, wide, new)

    def _problem(self, q: Array, k: Array, intervals: tuple[Interval, ...]) -> tuple:
        ends = self._ends(intervals)
        sizes = (len(intervals), len(q), len(k), q.shape[1], k.shape[1], q.shape[2])
        return ends, *map(np.int32, sizes), np.float64(self.softmax_scale)

    def _ends(self, intervals: tuple[Interval, ...]) -> Array:
        """Return begins and ends of the intervals, (2 intervals, nq) int32, on the device."""
        prepared = Intervals.of(intervals).prepared
        if self not in prepared:
            ends = np.stack([x for pair in intervals for x in pair])
            prepared[self] = self.device.upload(ends.astype(np.int32))
        return prepared[self]

    def _launch(self, name: str, rows: int, *args: Array) -> None:
        q, k = (args[0], args[1]) if name == "forward" else (args[1], args[2])
        if q.shape[2] > HEADDIM_MAX:
            raise ValueError(f"headdim can be at most {HEADDIM_MAX} on a GPU, got {q.shape[2]}")
        heads = k.shape[1] if name == "backward_kv" else q.shape[1]
        grid = (math.ceil(rows / BLOCK_ROWS), heads)
        self.device.attention(name, self.dtype, q.shape[2], self.logit_softcap, grid, *args)
