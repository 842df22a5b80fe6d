"""The kernel of cuDNN, the fastest one, for 16-bit tensors.

cuDNN knows three mask shapes: full, causal and band.  A block is cut into runs of queries that see
one shape each (`a2d_mpi.core.shapes.runs`), and cuDNN is launched once for each run.  The plain
kernel computes the other runs.

cuDNN's backward pass computes delta from the out of the queries over *all* keys, which only the
owner of the queries has.  Here cuDNN gets another out that has the same delta.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from a2d_mpi.core.masks import Interval
from a2d_mpi.core.shapes import Run, runs
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Remembered, Workspace
from a2d_mpi.kernels.cudnn_blocks import Block, supported
from a2d_mpi.kernels.cupy import CupyKernel
from a2d_mpi.kernels.graphs import Graphs, NotSupported

SHORTEST = 64  # queries of a run: the plain kernel does several shorter ones in one launch


class CudnnKernel:
    """Attention of some queries over some keys; see `a2d_mpi.kernels.numpy.NumpyKernel`.

    Parameters
    ----------
    plain : CupyKernel
        The kernel of runs that cuDNN does not take.
    work : Workspace, optional
        Holds the buffers of the kernel.
    deterministic : bool
        Gradients repeat bit for bit; slower.
    graphs : Graphs, optional
        The launcher of cuDNN; default: a new one.
    gradients : {"native", "float32"}
        Dtype to which cuDNN rounds the gradients of one run.  Runs are added up in float32.

    Attributes
    ----------
    product_dtype : dtype
        Dtype to which probabilities are rounded before they are multiplied: the tensors' dtype.

    Raises
    ------
    ImportError
        If cuDNN or its frontend is not installed.
    """

    def __init__(
        self,
        plain: CupyKernel,
        work: Workspace | None = None,
        deterministic: bool = False,
        graphs: Any = None,
        gradients: str = "native",
    ) -> None:
        self.plain, self.device, self.dtype = plain, plain.device, plain.dtype
        self.product_dtype = self.dtype
        self.gradients, self.deterministic = gradients, deterministic
        self._work = work or Workspace(plain.device)
        self._graphs = graphs or Graphs(deterministic=deterministic)
        self._runs = Remembered()

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        intervals: tuple[Interval, ...],
        out: Array,
        lse: Array,
    ) -> None:
        """Write the partial result to `lse` and `out`; `out` is of the dtype or float32."""
        for run in self._runs_of(intervals):
            rows, keys = run.rows, run.keys
            q_run, out_run, lse_run = q[rows], out[rows], lse[rows]
            block = self._block(run, q, k.shape[1], False)
            if block is None:
                self.plain.forward(q_run, k, v, run.intervals, out_run, lse_run)
                continue
            native = out_run if out.dtype == self.dtype else self._buffer("out", q_run.shape)
            stats = self._stats(q_run)
            self._launch(block, False, q_run, k[keys], v[keys], native, stats)
            self.device.transpose(lse_run, stats)
            if native is not out_run:
                self.device.put(out_run, native)

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
    ) -> None:
        """Add the gradients of this block to dq, dk and dv; `fresh`: overwrite dq, dk and dv."""
        found = self._runs_of(intervals)
        if fresh and not (len(found) == 1 and _is_block(found[0], q, k)):
            # Several runs add up, in float32.
            sums = [
                self._buffer(("sum", i), x.shape, np.float32) for i, x in enumerate((dq, dk, dv))
            ]
            for x in sums:
                self.device.zero(x)
            self.backward(dout, q, k, v, lse, delta, intervals, *sums)
            for to, x in zip((dq, dk, dv), sums, strict=True):
                self.device.put(to, x)
            return
        nheads, nheads_kv = q.shape[1], k.shape[1]
        if nheads != nheads_kv:
            # cuDNN's backward pass is slow on shared KV heads: each query head gets a copy.
            shared = (k, v)
            k, v = (self._buffer(x, (len(k), nheads, k.shape[2])) for x in "kv")
            for to, x in zip((k, v), shared, strict=True):
                self.device.repeat_heads(to, x)
        for run in found:
            rows, keys = run.rows, run.keys
            dout_run, q_run, dq_run = dout[rows], q[rows], dq[rows]
            block = self._block(run, q, nheads, True)
            if block is None:
                if nheads != nheads_kv:
                    k_plain, v_plain = shared
                else:
                    k_plain, v_plain = k, v
                self.plain.backward(
                    dout_run, q_run, k_plain, v_plain, lse[rows], delta[rows], run.intervals,
                    dq_run, dk, dv, fresh,
                )  # fmt: skip
                continue
            out, stats = self._buffer("out", q_run.shape), self._stats(q_run)
            self.device.out_of_delta(dout_run, delta[rows], out)
            self.device.transpose(stats, lse[rows])
            k_run, v_run = k[keys], v[keys]
            sums = [(dq_run, q_run), (dk[keys], k_run), (dv[keys], v_run)]
            native = [
                to if fresh and to.shape == x.shape and self._is_native(to)
                else self._buffer(("native", i), x.shape, self._gradient_dtype)
                for i, (to, x) in enumerate(sums)
            ]  # fmt: skip
            self._launch(block, True, q_run, k_run, v_run, out, dout_run, stats, *native)
            for (to, _), x in zip(sums, native, strict=True):
                if x.shape != to.shape:
                    self.device.sum_heads(to, x, add=not fresh)
                elif x is not to:
                    self.device.put(to, x, add=not fresh)

    @property
    def _gradient_dtype(self) -> np.dtype:
        return np.dtype(np.float32) if self.gradients == "float32" else self.dtype

    def _is_native(self, x: Array) -> bool:
        return x.dtype == self._gradient_dtype

    def _runs_of(self, intervals: tuple[Interval, ...]) -> list[Run]:
        return self._runs.get(intervals, lambda: runs(intervals, SHORTEST))

    def _block(self, run: Run, q: Array, nheads_kv: int, backward: bool) -> Block | None:
        """The launch of cuDNN for a run; None for a run that cuDNN does not take."""
        if run.shape == "general":
            return None
        block = Block(
            dtype=self.dtype.name,
            nheads=q.shape[1],
            nheads_kv=nheads_kv,
            headdim=q.shape[2],
            nq=run.rows.stop - run.rows.start,
            nk=run.keys.stop - run.keys.start,
            shape=run.shape,
            window=run.window,
            scale=self.plain.softmax_scale,
        )
        capability = self.device.capability
        if supported(block, capability, backward, self.gradients, self.deterministic):
            return None
        try:
            self._graphs.workspace_size(block, backward, self.gradients)
        except NotSupported:
            return None
        return block

    def _launch(self, block: Block, backward: bool, *arrays: Array) -> None:
        size = self._graphs.workspace_size(block, backward, self.gradients)
        workspace = self._buffer("workspace", (max(size, 1),), np.uint8).data.ptr
        stream = cupy.cuda.get_current_stream().ptr
        pointers = [x.data.ptr for x in arrays]
        if backward:
            self._graphs.backward(block, *pointers, workspace, stream, self.gradients)
        else:
            self._graphs.forward(block, *pointers, workspace, stream)

    def _stats(self, q: Array) -> Array:
        """Buffer of lse in cuDNN's order, heads first."""
        return self._buffer("stats", (q.shape[1], len(q)), np.float32)

    def _buffer(self, name: object, shape: tuple, dtype: Any = None) -> Array:
        return self._work.get(("kernel", name), shape, dtype or self.dtype)


def _is_block(run: Run, q: Array, k: Array) -> bool:
    """Tell whether a run covers its whole block."""
    if run.shape == "general":
        return run.rows == slice(0, len(q))
    return run.rows == slice(0, len(q)) and run.keys == slice(0, len(k))
