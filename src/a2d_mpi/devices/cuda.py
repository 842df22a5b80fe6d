"""CuPy arrays on an NVIDIA GPU: the device, and the compilation and launch of its kernels.

CuPy provides memory, streams and events.  All arithmetic is in kernels/kernels.cu, so CuPy need
not compute with the dtypes of tensors.  Everything is queued on the caller's current CuPy stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

try:
    import cupy
except ImportError as error:
    raise ImportError(
        "CuPy is not installed: pip install a2d_mpi[cuda13], or a2d_mpi[cuda12]"
    ) from error

from a2d_mpi.core.dtypes import DTYPES, compute_dtype
from a2d_mpi.core.wire import FORMATS
from a2d_mpi.devices.protocol import Array

LANES, WARPS = 32, 4  # as in kernels.cu
ALIGNMENT = 16  # bytes
PARTS = 2048  # sums over tokens that are added up to a sum; not tuned on a GPU
SUCCESS, NOT_READY = 0, 600  # cudaError_t


class Cuda:
    """One GPU; see `a2d_mpi.devices.protocol.Device` for the methods without a docstring.

    Parameters
    ----------
    index : int
        CUDA device number in this process.

    Attributes
    ----------
    capability : (int, int)
        Compute capability, major and minor.
    description : str
        The GPU's name.
    """

    name = "gpu"

    def __init__(self, index: int) -> None:
        self.index = index
        number = int(cupy.cuda.Device(index).compute_capability)
        self.capability = divmod(number, 10)
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.description = properties["name"].decode()
        # Copies run beside the kernels.  Each direction has a stream of its own, so that neither
        # waits for the other.
        self._uploads, self._downloads = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))

    @staticmethod
    def current() -> Cuda:
        """Return the GPU that is current in CuPy."""
        return _device(cupy.cuda.Device().id)

    def owns(self, x: object) -> bool:
        return isinstance(x, cupy.ndarray) and x.device.id == self.index

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
        return cupy.empty(shape, dtype)

    def contiguous(self, x: Array) -> Array:
        x = cupy.ascontiguousarray(x)
        # cuDNN reads 16 bytes at once, and a view may begin anywhere.
        return x.copy() if x.data.ptr % ALIGNMENT else x

    def upload(self, x: np.ndarray) -> Array:
        return cupy.asarray(x)

    def download(self, x: Array) -> np.ndarray:
        return cupy.asnumpy(x)

    def zero(self, x: Array) -> None:
        x.data.memset_async(0, x.nbytes, cupy.cuda.get_current_stream())

    def put(self, to: Array, x: Array, add: bool = False) -> None:
        if x.dtype == to.dtype and not add:
            to.data.copy_from_device_async(x.data, x.nbytes, cupy.cuda.get_current_stream())
            return
        self.put_all([(to, x, add)])

    def put_all(self, puts: Sequence[tuple[Array, Array, bool]]) -> None:
        """Copy or add up to three arrays in one launch.

        Parameters
        ----------
        puts : sequence of (to, x, add)
            Arrays (..., heads, elements), as in `put`.  All x have one dtype.  If `to` has fewer
            heads than x, it gets the sums of groups of heads, the transpose of `repeat_heads`.
        """
        tensor = min((y.dtype for put in puts for y in put[:2]), key=lambda x: x.itemsize)
        arrays, groups, widths, ends, rows = [], [], [], [], 0
        for to, x, add in (*puts, *[puts[-1]] * (3 - len(puts))):
            arrays += [to, int(to.dtype != tensor), int(not add), x]
            groups.append(x.size // to.size if to.size else 1)
            widths.append(math.prod(to.shape[2:]))
        for to, _, _ in puts:
            rows += math.prod(to.shape[:2])
            ends.append(np.int64(rows))
        ends = [*ends, *ends[-1:] * 2][:2]
        wide_from = int(puts[0][1].dtype != tensor)
        given = *arrays, wide_from, *groups, *widths[:2], *ends
        self._rows("put_rows", tensor, *given, (rows, 1, widths[2]))

    def encode(self, to: Array, x: Array, wire: str) -> None:
        form, top = FORMATS[wire], np.float64(FORMATS[wire].largest)
        numbers = to.shape[2], form.mantissa, form.lowest, form.highest, top
        self._rows("encode", x.dtype, to, x, *numbers, x.shape)

    def decode(self, to: Array, x: Array, wire: str) -> None:
        numbers = x.shape[2], FORMATS[wire].mantissa, FORMATS[wire].lowest
        self._rows("decode", to.dtype, to, x, *numbers, to.shape)

    def take(self, to: Array, x: Array, order: Array) -> None:
        self._rows("take_rows", x.dtype, to, x, order, (len(to), *x.shape[1:]), outer=1)

    def add_at(self, to: Array, x: Array, order: Array) -> None:
        self._rows("add_rows", x.dtype, to, x, order, x.shape, outer=1)

    def put_at(self, to: Array, x: Array, order: Array) -> None:
        self._rows("put_rows_at", x.dtype, to, x, order, x.shape, outer=1)

    def take_heads(self, to: Array, x: Array, first: int) -> None:
        stride, begin = x.shape[1] * x.shape[2], first * x.shape[2]
        self._rows("take_columns", x.dtype, to, x, stride, begin, to.shape, outer=1)

    def put_heads(self, to: Array, x: Array, first: int, add: bool = False) -> None:
        stride, begin = to.shape[1] * to.shape[2], first * to.shape[2]
        self._rows("put_columns", x.dtype, to, x, stride, begin, int(add), x.shape, outer=1)

    def merge(self, out: Array, lse: Array, compensation: Array, out2: Array, lse2: Array) -> None:
        tensor = min(out.dtype, out2.dtype, key=lambda x: x.itemsize)
        wide = int(out2.dtype != tensor)
        self._rows("merge", tensor, out, lse, compensation, out2, wide, lse2, out.shape)

    def add_sink(self, out: Array, lse: Array, sink: Array) -> None:
        self._rows("add_sink", out.dtype, out, lse, sink, len(sink), out.shape)

    def sink_gradient(self, lse: Array, delta: Array, sink: Array) -> Array:
        gradient = cupy.empty(sink.shape, sink.dtype)
        self.zero(gradient)
        parts = min(len(lse), PARTS)
        sums = cupy.empty((parts, len(sink)), np.float64)
        self._rows("sink_sums", lse.dtype, lse, delta, sink, sums, len(lse), sums.shape, outer=1)
        self._rows("sink_gradient", lse.dtype, gradient, sums, sums.shape[::-1], outer=1)
        return gradient

    def delta(self, dout: Array, out: Array) -> Array:
        delta = cupy.empty(out.shape[:2], compute_dtype(out.dtype))
        self._rows("delta_of", out.dtype, dout, out, delta, out.shape, pieces=True)
        return delta

    def subtract(self, delta: Array, dlse: Array, lse: Array) -> None:
        self._rows("subtract", delta.dtype, delta, dlse, lse, delta.shape, outer=1)

    def out_and_stats(
        self, dout: Array, delta: Array, out: Array, lse: Array, stats: Array, places: Array
    ) -> None:
        """Set `out` and `stats` as cuDNN's backward pass takes them.

        Parameters
        ----------
        dout, out : (tokens, nheads, headdim_v)
            Heads of at most 512 bytes.  Each row of `out` is set to the multiple of dout with
            ``rowsum(dout * out) = delta``.
        delta, lse : (tokens, nheads)
        stats : float array
            Receives lse with heads first, one query after the other.
        places : (3, queries) int64
            Three numbers for each query of `stats`.  The first is its row of lse; with -1, +inf is
            written.  The second is the place of its first head in `stats`.  The third is the
            distance from one head to the next.
        """
        if (size := dout.shape[2] * dout.dtype.itemsize) > LANES * ALIGNMENT:
            raise ValueError(f"a head can have at most {LANES * ALIGNMENT} bytes, got {size}")
        n, nheads = places.shape[1], lse.shape[1]
        given = dout, delta, out, lse, stats, *places, n, nheads
        self._rows("out_and_stats", dout.dtype, *given, dout.shape, pieces=True)

    def transpose(self, to: Array, x: Array) -> None:
        """Set ``to = x[:, :len(to)].T`` for two-dimensional arrays of an accumulation dtype."""
        turned = to.shape[1] < to.shape[0]
        shape = to.shape if turned else to.shape[::-1]
        stride = np.int64(x.shape[1])
        self._rows("transpose", x.dtype, to, x, int(turned), stride, shape, outer=1)

    def repeat_heads(self, to: Array, x: Array) -> None:
        """Copy each head of x (tokens, heads, headdim) to its group of heads of `to`."""
        group, headdim = to.shape[1] // x.shape[1], x.shape[2]
        self._rows("repeat_heads", x.dtype, to, x, group, headdim, to.shape, outer=1)

    def mark(self) -> Any:
        event = cupy.cuda.Event()
        event.record()
        return event

    def after(self, mark: Any) -> None:
        cupy.cuda.get_current_stream().wait_event(mark)

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return cupy.cuda.get_elapsed_time(start, end) / 1e3

    def done(self, event: Any) -> bool:
        """Return True if the device has reached an event.

        Raises
        ------
        CUDARuntimeError
            If a kernel or copy has failed.  The device would never reach the event.
        """
        status = cupy.cuda.runtime.eventQuery(event.ptr)  # `event.done` hides a failure
        if status not in (SUCCESS, NOT_READY):
            raise cupy.cuda.runtime.CUDARuntimeError(status)
        return status == SUCCESS

    def pinned(self, nbytes: int) -> np.ndarray:
        """Allocate page-locked host memory, (nbytes,) uint8."""
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def copy(self, to: Array, x: Array, after: Any = None) -> Any:
        """Start copying bytes between page-locked host memory and the device, beside kernels.

        If the event `after` is given, this copy and all later copies in the same direction wait
        for that event.  Return the event at the end of this copy.
        """
        stream = self._uploads if isinstance(x, np.ndarray) else self._downloads
        if after is not None:
            stream.wait_event(after)
        if isinstance(x, np.ndarray):
            to.data.copy_from_host_async(x.ctypes.data, x.nbytes, stream)
        else:
            x.data.copy_to_host_async(to.ctypes.data, x.nbytes, stream)
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _rows(
        self, name: str, dtype: np.dtype, *args: Any, outer: int = 2, pieces: bool = False
    ) -> None:
        """Launch a kernel that works on rows: the first `outer` axes of the last argument.

        A warp works on a row.  With `pieces`, so do only as many threads as load the row in pieces
        of 16 bytes.  Their number, a power of two, is an argument of the kernel.
        """
        *args, shape = args
        rows, width = math.prod(shape[:outer]), math.prod(shape[outer:])
        if rows * width == 0:
            return
        lanes = LANES
        if pieces:
            number = -(-width * dtype.itemsize // ALIGNMENT)
            lanes = min(LANES, 1 << (number - 1).bit_length())
            args.append(lanes)
        blocks = min(-(-rows * lanes // (WARPS * LANES)), 1 << 20)
        # CuPy would make Python's integers 64 bits wide.
        args = [np.int32(x) if isinstance(x, int) else x for x in args]
        launch = kernel_of(self.index, name, dtype, (LANES, LANES))
        launch((blocks,), (LANES * WARPS,), (*args, np.int64(rows), np.int32(width)))


@cache
def _device(index: int) -> Cuda:
    return Cuda(index)


@cache
def kernel_of(
    index: int, name: str, dtype: np.dtype, widths: tuple, logit_softcap: float | None = None
) -> Any:
    """Return a kernel of kernels.cu, compiled for headdim and headdim_v, multiples of LANES."""
    # The index is part of the key: a compiled module belongs to one GPU.
    return _module(index, dtype, widths, logit_softcap).get_function(name)


@cache
def _module(index: int, dtype: np.dtype, widths: tuple, logit_softcap: float | None) -> Any:
    element = list(DTYPES.values()).index(dtype)
    source = files("a2d_mpi").joinpath("kernels", "kernels.cu").read_text()
    options = [f"-DELEMENT={element}", f"-DHEADDIM={widths[0]}", f"-DHEADDIM_V={widths[1]}"]
    if logit_softcap is not None:
        options.append(f"-DSOFTCAP={logit_softcap!r}")
    return cupy.RawModule(code=source, options=("--std=c++17", *options))
