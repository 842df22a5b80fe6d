"""Where arrays live: dtypes, buffers, and the host as a device; `a2d_mpi.cuda` is the other one.

The algorithms ask a device for what they do with arrays besides attention itself.  It follows from
the arrays that the caller passes: NumPy in, NumPy out; CuPy in, CuPy out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from a2d_mpi.merge import merge

# 16-bit tensors are stored and sent as such; statistics, products and sums are float32.
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

KEPT = 1024  # things of which is remembered what was made; a ring has as many as ranks

Array = Any  # numpy.ndarray or cupy.ndarray: the package works without the latter


def as_dtype(dtype: np.typing.DTypeLike) -> np.dtype:
    """The dtype of tensors that is meant, by name or otherwise; ValueError if it is none."""
    try:
        found = DTYPES.get(str(dtype)) or np.dtype(dtype)
    except (TypeError, SyntaxError):
        found = None
    # NumPy takes None for float64, also in comparisons.
    if dtype is None or found is None or found not in DTYPES.values():
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {dtype!r}")
    return found


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """What tensors of `dtype` are computed and accumulated in: float32, or float64 for itself."""
    return np.result_type(dtype, np.float32)


class Host:
    """NumPy arrays in the memory of this process: what the algorithms ask of a device."""

    name = "cpu"
    description = None  # the CPU's name is for `a2d_mpi.results` to find

    def owns(self, x: object) -> bool:
        """Whether `x` is an array of this device."""
        return isinstance(x, np.ndarray)

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
        """New C-contiguous array, contents undefined."""
        return np.empty(shape, dtype)

    def contiguous(self, x: Array) -> Array:
        """`x`, or a C-contiguous copy."""
        return np.ascontiguousarray(x)

    def upload(self, x: np.ndarray) -> Array:
        """A NumPy array, on this device."""
        return x

    def download(self, x: Array) -> np.ndarray:
        """An array of this device, as a NumPy array."""
        return x

    def finite(self, x: Array, lowest: bool = False) -> bool:
        """Whether no element is NaN or infinite; `lowest`: but for -inf."""
        return bool(x.max(initial=-math.inf) < math.inf if lowest else np.isfinite(x).all())

    def zero(self, x: Array) -> None:
        """Fill with zeros."""
        x[...] = 0

    def put(self, to: Array, x: Array, add: bool = False) -> None:
        """Copy (or add) `x` to `to`, of the same shape, whatever the dtypes of tensors."""
        if add:
            to += x
        else:
            to[...] = x

    def take(self, to: Array, x: Array, order: Array) -> None:
        """``to[i] = x[order[i]]``, `order` int64 and uploaded."""
        # mode: with the default, NumPy fills a copy of `out` first.
        np.take(x, order, 0, to, "clip")

    def add_at(self, to: Array, x: Array, order: Array) -> None:
        """``to[order[i]] += x[i]``; no index occurs twice."""
        to[order] += x

    def put_at(self, to: Array, x: Array, order: Array) -> None:
        """``to[order[i]] = x[i]``; no index occurs twice."""
        to[order] = x

    def take_heads(self, to: Array, x: Array, first: int) -> None:
        """``to = x[:, first:]``, as many heads as `to` has; both (tokens, heads, elements)."""
        to[...] = x[:, first : first + to.shape[1]]

    def put_heads(self, to: Array, x: Array, first: int, add: bool = False) -> None:
        """Copy (or add) x to the heads of `to` from `first` on; both of one dtype."""
        self.put(to[:, first : first + x.shape[1]], x, add)

    def merge(self, out: Array, lse: Array, rest: Array, out2: Array, lse2: Array) -> None:
        """`a2d_mpi.merge.merge`: (out2, lse2) into (out, lse)."""
        merge(out, lse, rest, out2, lse2)

    def delta(self, dout: Array, out: Array) -> Array:
        """``rowsum(dout * out)``, (tokens, nheads) in the compute dtype."""
        return np.einsum("thd,thd->th", dout, out, dtype=compute_dtype(out.dtype))

    def mark(self) -> Any:
        """A point in time on this device: when all that was asked of it so far is done."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks; waits for the second."""
        return end - start


def device_of(x: object) -> Any:
    """The device that `x` lives on; TypeError if it is no array of a known kind."""
    if type(x).__module__.split(".")[0] == "cupy":
        from a2d_mpi.cuda import Cuda

        return Cuda.current()
    if HOST.owns(x) and not isinstance(x, np.ma.MaskedArray):  # whose mask would be lost
        return HOST
    raise TypeError(f"must be a NumPy or CuPy array, got {type(x).__name__}")


HOST = Host()


class Remembered:
    """What was made of objects that are not changed, by their identity."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[object, Any]] = {}

    def get(self, x: object, make: Callable[[], Any], *options: int) -> Any:
        """What `make` returned for `x` and these options, now or at an earlier call."""
        key = id(x), *options
        if key not in self._made:
            if len(self._made) == KEPT:  # a caller who has new objects at every call
                self._made.clear()
            self._made[key] = x, make()  # kept with it: no other gets the same id
        return self._made[key][1]


class Workspace:
    """Named buffers that are allocated once and grow when a larger one is asked for."""

    def __init__(self, device: Any = HOST) -> None:
        self.device = device
        self._buffers: dict[object, Array] = {}

    def get(self, name: object, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
        """Contiguous array in the buffer `name`; its contents are undefined.

        The array shares memory with every other one got under the same name.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[name] = self.device.empty((nbytes,), np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)

    def parcel(
        self, name: object, like: Sequence[tuple[tuple[int, ...], np.dtype]]
    ) -> tuple[Array, list[Array]]:
        """Tensors that travel in one message: the buffer `name`, and contiguous parts of it.

        Parameters
        ----------
        name : object
        like : sequence of (shape, dtype)
            Of the tensors, which fill the buffer without gaps.

        Returns
        -------
        whole : (bytes,) uint8
        tensors : list of arrays
            Their contents are undefined.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in like]
        whole, start = self.get(name, (sum(sizes),), np.uint8), 0
        tensors: list[Any] = [None] * len(like)
        # Those of large elements first: so all are aligned.
        for i in sorted(range(len(like)), key=lambda i: -like[i][1].itemsize):
            shape, dtype = like[i]
            tensors[i] = whole[start : start + sizes[i]].view(dtype).reshape(shape)
            start += sizes[i]
        return whole, tensors

    def nbytes(self, apart: str) -> int:
        """Bytes of all buffers but those named ``(apart, ...)``."""
        return sum(x.size for name, x in self._buffers.items() if name[0] != apart)

    def clear(self) -> None:
        """Release all buffers."""
        self._buffers.clear()
