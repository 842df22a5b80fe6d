"""The memory of this process as a device."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.core.merge import merge
from a2d_mpi.devices.protocol import Array


class Host:
    """The device of NumPy arrays; see `a2d_mpi.devices.protocol.Device` for the methods."""

    name = "cpu"
    description = None

    def owns(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
        return np.empty(shape, dtype)

    def contiguous(self, x: Array) -> Array:
        return np.ascontiguousarray(x)

    def upload(self, x: np.ndarray) -> Array:
        return x

    def download(self, x: Array) -> np.ndarray:
        return x

    def finite(self, x: Array, lowest: bool = False) -> bool:
        """Return True if no element is NaN or infinite.  With `lowest`, -inf is allowed."""
        return bool(x.max(initial=-math.inf) < math.inf if lowest else np.isfinite(x).all())

    def zero(self, x: Array) -> None:
        x[...] = 0

    def put(self, to: Array, x: Array, add: bool = False) -> None:
        if add:
            to += x
        else:
            to[...] = x

    def encode(self, to: Array, x: Array, wire: str) -> None:
        from a2d_mpi.core.wire import encode

        encode(to, x, wire)

    def decode(self, to: Array, x: Array, wire: str) -> None:
        from a2d_mpi.core.wire import decode

        decode(to, x, wire)

    def take(self, to: Array, x: Array, order: Array) -> None:
        # With the default mode, "raise", NumPy fills a copy of `to` first.
        np.take(x, order, 0, to, "clip")

    def add_at(self, to: Array, x: Array, order: Array) -> None:
        to[order] += x

    def put_at(self, to: Array, x: Array, order: Array) -> None:
        to[order] = x

    def take_heads(self, to: Array, x: Array, first: int) -> None:
        to[...] = x[:, first : first + to.shape[1]]

    def put_heads(self, to: Array, x: Array, first: int, add: bool = False) -> None:
        self.put(to[:, first : first + x.shape[1]], x, add)

    def merge(self, out: Array, lse: Array, compensation: Array, out2: Array, lse2: Array) -> None:
        merge(out, lse, compensation, out2, lse2)

    def add_sink(self, out: Array, lse: Array, sink: Array) -> None:
        from a2d_mpi.core.sinks import add_sink

        add_sink(out, lse, sink)

    def sink_gradient(self, lse: Array, delta: Array, sink: Array) -> Array:
        from a2d_mpi.core.sinks import sink_gradient

        return sink_gradient(lse, delta, sink)

    def delta(self, dout: Array, out: Array) -> Array:
        return np.einsum("thd,thd->th", dout, out, dtype=compute_dtype(out.dtype))

    def subtract(self, delta: Array, dlse: Array, lse: Array) -> None:
        np.subtract(delta, dlse, out=delta, where=lse != -math.inf)

    def mark(self) -> Any:
        return time.perf_counter()

    def after(self, mark: Any) -> None:
        pass  # nothing is queued on the host

    def seconds(self, start: Any, end: Any) -> float:
        return end - start


HOST = Host()
