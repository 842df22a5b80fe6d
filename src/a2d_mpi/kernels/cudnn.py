"""The tile kernel of cuDNN: the fastest there is, on what it takes.

It knows full rectangles, triangles and bands, of 16-bit tensors.  A tile is cut into such runs of
queries (`a2d_mpi.core.masks.runs`), one launch each; what is left goes to the plain kernel.

cuDNN's backward pass takes the out of the queries over *all* keys, to compute delta from it, which
here only the queries' owner has.  It gets another out, with the same delta.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from a2d_mpi.core.masks import Interval, Run, runs
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Remembered, Workspace
from a2d_mpi.kernels.cupy import CupyKernel
from a2d_mpi.kernels.graphs import Block, Graphs, NotSupported, supported

SHORTEST = 64  # queries of a run: below, one launch of the plain kernel for several is better


class CudnnKernel:
    """Attention of some queries over some keys; see `a2d_mpi.kernels.numpy.NumpyKernel`.

    Parameters
    ----------
    plain : CupyKernel
        What takes over where cuDNN does not do.
    work : Workspace, optional
        Where its buffers lie.
    deterministic : bool
        Gradients repeat bit for bit; slower.
    graphs : Graphs, optional
        What launches cuDNN.
    gradients : {"native", "float32"}
        What cuDNN rounds the gradients of one run to; they are added up in float32 either way.

    Attributes
    ----------
    product_dtype : dtype
        What probabilities are rounded to before they are multiplied: that of the tensors.

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
        """Write the partial result to `out`, of the dtype or float32, and `lse`."""
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
        """Add the gradients that this tile contributes, or overwrite what is `fresh`."""
        found = self._runs_of(intervals)
        if fresh and not (len(found) == 1 and _whole(found[0], q, k)):
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
            # cuDNN's backward pass is slow on shared heads: each query head gets its own.
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
        """What cuDNN is to launch for a run, or None if it does not do."""
        if run.kind == "mixed":
            return None
        block = Block(
            dtype=self.dtype.name,
            nheads=q.shape[1],
            nheads_kv=nheads_kv,
            headdim=q.shape[2],
            nq=run.rows.stop - run.rows.start,
            nk=run.keys.stop - run.keys.start,
            kind=run.kind,
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
        """lse as cuDNN has it, heads first."""
        return self._buffer("stats", (q.shape[1], len(q)), np.float32)

    def _buffer(self, name: object, shape: tuple, dtype: Any = None) -> Array:
        return self._work.get(("kernel", name), shape, dtype or self.dtype)


def _whole(run: Run, q: Array, k: Array) -> bool:
    """Whether a run covers its whole tile."""
    if run.kind == "mixed":
        return run.rows == slice(0, len(q))
    return run.rows == slice(0, len(q)) and run.keys == slice(0, len(k))
