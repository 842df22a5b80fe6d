"""The kernel of cuDNN, the fastest kernel for 16-bit tensors.

Each interval of a mask is cut into runs of queries with one mask shape each
(`a2d_mpi.kernels.shapes.runs`).  cuDNN is launched for each run, on the keys that the run sees.
Partial results of several intervals are merged.  The plain kernel computes the runs that cuDNN
refuses.

cuDNN's backward pass computes delta from the out of the queries over *all* keys.  Only the owner
of the queries has this out.  So cuDNN gets another out that has the same delta.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import cupy
import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.kernels.cudnn_calls import CallMaker, RunCall
from a2d_mpi.kernels.cupy import CupyKernel
from a2d_mpi.kernels.graphs import graphs_of
from a2d_mpi.masks.intervals import Intervals

NO_KEYS = np.float32(-np.inf)  # the lse of no keys


class CudnnKernel:
    """The kernel of cuDNN; see `a2d_mpi.kernels.numpy.NumpyKernel`.

    Parameters
    ----------
    given, options
        As of `a2d_mpi.kernels.cupy.CupyKernel`.
    work : Workspace, optional
        Buffers of the kernel.
    graphs : Graphs, optional
        The launcher of cuDNN.  Default: the launcher that all kernels of the device share.

    Attributes
    ----------
    plain : CupyKernel
        The kernel for runs that cuDNN does not compute.
    product_dtype : dtype
        Dtype to which probabilities are rounded before they are multiplied: the tensors' dtype.
    rounds_partials, fallbacks
        As in `a2d_mpi.kernels.protocol.Kernel`.

    Raises
    ------
    ImportError
        If cuDNN or its frontend is not installed.
    """

    name = "cudnn"
    rounds_partials = True
    deterministic = False  # sums of gradients are fastest without a fixed order

    def __init__(
        self, *given: Any, work: Workspace | None = None, graphs: Any = None, **options: Any
    ) -> None:
        self.plain = plain = CupyKernel(*given, **options)
        self.device, self.dtype = plain.device, plain.dtype
        self.product_dtype = plain.dtype
        self._work = work or Workspace(plain.device)
        self._calls = CallMaker(plain, graphs or graphs_of(plain.device.index))
        self.fallbacks: Counter[tuple[str, str]] = Counter()

    def forward(
        self, q: Array, k: Array, v: Array, intervals: Intervals, out: Array, lse: Array, **_: Any
    ) -> None:
        """Write the partial result to `lse` and `out`, which has the tensors' dtype or float32."""
        runs = self._calls.get(intervals, q, v, k.shape[1], False)
        self._count("forward", runs.falls_back)
        if runs.single:
            for call in runs.calls:
                self._attend(call, q, k, v, out[call.rows], lse[call.rows])
            return
        total = out if out.dtype == np.float32 else self._buffer("total", out.shape, np.float32)
        compensation = self._buffer("compensation", lse.shape, np.float32)
        self.device.zero(total)
        self.device.zero(compensation)
        lse.fill(NO_KEYS)
        for call in runs.calls:
            to = [x[call.rows] for x in (total, lse, compensation)]
            partial_out = self._buffer("part", to[0].shape)
            partial_lse = self._buffer("lse", to[1].shape, np.float32)
            self._attend(call, q, k, v, partial_out, partial_lse)
            self.device.merge(*to, partial_out, partial_lse)
        if total is not out:
            self.device.put(out, total)

    def backward(
        self, dout, q, k, v, lse, delta, intervals, dq, dk, dv, fresh=False, any_delta=False, **_
    ) -> None:
        """Add the block's gradients to dq, dk and dv; overwrite dq, dk and dv if `fresh`.

        With `any_delta`, no out may have this delta (if dout is 0).  So the plain kernel computes.
        """
        if any_delta:
            self._count("backward", True)
            self.plain.backward(dout, q, k, v, lse, delta, intervals, dq, dk, dv, fresh)
            return
        nheads, gradients = q.shape[1], (dq, dk, dv)
        runs = self._calls.get(intervals, q, v, nheads, True)
        self._count("backward", runs.falls_back)
        everything = slice(0, len(q)), slice(0, len(k))
        one_call = [(call.rows, call.keys) for call in runs.calls] == [everything]
        # Rows that only one run writes are overwritten; several runs are summed in float32.
        new = [fresh and runs.single, fresh and one_call, fresh and one_call]
        sums = [
            x if alone or not fresh or x.dtype == np.float32
            else self._buffer(("sum", i), x.shape, np.float32)
            for i, (x, alone) in enumerate(zip(gradients, new))
        ]  # fmt: skip
        for x, alone in zip(sums, new):
            if fresh and not alone:
                self.device.zero(x)
        inputs, places = [q, k, v], runs.places
        if places is not None and nheads != k.shape[1]:
            # cuDNN's backward pass is slow on shared KV heads: each query head gets a copy.
            for i, x in enumerate((k, v), 1):
                inputs[i] = self._buffer("qkv"[i], (len(x), nheads, x.shape[2]))
                self.device.repeat_heads(inputs[i], x)
        if places is not None:
            out = self._buffer("out", dout.shape)
            stats = self._buffer("stats", (runs.stats,), np.float32)
            self.device.out_and_stats(dout, delta, out, lse, stats, places)
            inputs += [out, dout, stats]
        for call in runs.calls:
            if call.launch is not None:
                self._add_gradients(call, inputs, sums, new)
                continue
            rows, keys = call.rows, call.keys
            if new[0] and not (one_call and call.intervals):
                self.device.zero(sums[0][rows])
            if call.intervals:
                self.plain.backward(
                    dout[rows], q[rows], k[keys], v[keys], lse[rows], delta[rows],
                    call.intervals, sums[0][rows], sums[1][keys], sums[2][keys], new[1],
                )  # fmt: skip
        for to, x in zip(gradients, sums):
            if x is not to:
                self.device.put(to, x)

    def _count(self, phase: str, falls_back: bool) -> None:
        if falls_back:
            self.fallbacks[phase, self.plain.name] += 1

    def _attend(self, call: RunCall, q: Array, k: Array, v: Array, out: Array, lse: Array) -> None:
        """Compute one run; `out` and `lse` are the rows of its queries."""
        rows, keys = call.rows, call.keys
        if not call.intervals:
            self.device.zero(out)
            lse.fill(NO_KEYS)
            return
        if call.launch is None:
            self.plain.forward(q[rows], k[keys], v[keys], call.intervals, out, lse)
            return
        native, nq = out, call.launch.block.nq
        if out.dtype != self.dtype or len(out) < nq:
            native = self._buffer("out", (nq, *out.shape[1:]))
        stats = self._buffer("stats", (lse.shape[1], nq), np.float32)  # cuDNN wants heads first
        given = [self._input(call, i, x) for i, x in enumerate((q, k, v))]
        self._launch(call, (*given, native.data.ptr, stats.data.ptr))
        self.device.transpose(lse, stats)
        if native is not out:
            self.device.put(out, native[: len(out)])
        if (places := call.masked[0]) is not None:
            self._clear(out, places)
            lse[places] = NO_KEYS

    def _add_gradients(self, call: RunCall, inputs: list, sums: list, new: list[bool]) -> None:
        """Compute the gradients of one call by cuDNN.

        Parameters
        ----------
        call : RunCall
        inputs : list of array
            q, k, v, out, dout and stats.
        sums : list of array
            dq, dk and dv, to which the gradients are added.
        new : list of bool
            Whether to overwrite each of `sums` instead.
        """
        nheads, block = sums[0].shape[1], call.launch.block
        pointers = [self._input(call, i, x) for i, x in enumerate(inputs[:5])]
        pointers.append(inputs[5].data.ptr + call.stats)
        puts = []  # gradients to copy or add to rows of the sums
        for i, where in enumerate((call.rows, call.keys, call.keys)):
            x, n = sums[i][where], block.nk if i else block.nq
            if new[i] and x.shape == (n, nheads, x.shape[2]) and x.dtype == self.dtype:
                pointers.append(x.data.ptr)
                continue
            y = self._buffer(("native", i), (n, nheads, x.shape[2]))
            pointers.append(y.data.ptr)
            puts.append((x, y[: len(x)], not new[i]))
        self._launch(call, pointers)
        if puts:
            self.device.put_all(puts)

    def _input(self, call: RunCall, i: int, x: Array) -> int:
        """Return a pointer to the rows of an input that a launch reads.

        Masked rows and keys may be NaN, and cuDNN multiplies them by 0.  They are cleared in a
        copy, and so are rows beyond the run, if they are masked or not there.  `i` is the place
        of x among q, k, v, out and dout.
        """
        of_keys, block = i in (1, 2), call.launch.block
        rows, places = (call.rows, call.keys)[of_keys], call.masked[of_keys]
        if call.in_place[of_keys]:
            return _at(x, rows)
        n = rows.stop - rows.start
        cleared = self._buffer(("cleared", i), (block.nk if of_keys else block.nq, *x.shape[1:]))
        self.device.put(cleared[:n], x[rows])
        self.device.zero(cleared[n:])
        if places is not None:
            self._clear(cleared, places)
        return cleared.data.ptr

    def _clear(self, x: Array, places: Array) -> None:
        """Set the rows of x at `places` to 0."""
        zeros = self._buffer("nothing", (len(places), *x.shape[1:]), x.dtype)
        self.device.zero(zeros)
        self.device.put_at(x, zeros, places)

    def _launch(self, call: RunCall, pointers: Iterable[int]) -> None:
        size = max(call.launch.workspace_size, 1)
        workspace = self._buffer("workspace", (size,), np.uint8).data.ptr
        if (numbers := call.numbers) is not None:
            pointers = *pointers, numbers.data.ptr, numbers.data.ptr + numbers.nbytes // 2
        call.launch(pointers, workspace, cupy.cuda.get_current_stream().ptr)

    def _buffer(self, name: object, shape: tuple, dtype: Any = None) -> Array:
        return self._work.get(("kernel", name), shape, dtype or self.dtype)


def _at(x: Array, rows: slice) -> int:
    """Return a pointer to rows, which takes less time than a slice."""
    return x.data.ptr + (rows.start * (x.nbytes // len(x)) if rows.start else 0)
