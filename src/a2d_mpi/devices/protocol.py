"""The protocol of a device: memory, and all operations on arrays except attention itself."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = np.ndarray  # or cupy.ndarray, which has no types; the package works without CuPy


class Device(Protocol):
    """A device: `a2d_mpi.devices.host.Host` or `a2d_mpi.devices.cuda.Cuda`.

    Attributes
    ----------
    name : {"cpu", "gpu"}
    description : str or None
        The name of the GPU.  None on the host: `a2d_mpi.results.origin` finds the CPU's name.
    """

    name: str
    description: str | None

    def owns(self, x: object) -> bool:
        """Return True if `x` is an array of this device."""

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
        """Return a new C-contiguous array; its contents are undefined."""

    def contiguous(self, x: Array) -> Array:
        """Return `x` itself or a C-contiguous copy of it."""

    def upload(self, x: np.ndarray) -> Array:
        """Copy a NumPy array to this device."""

    def download(self, x: Array) -> np.ndarray:
        """Copy an array of this device to a NumPy array."""

    def zero(self, x: Array) -> None:
        """Fill an array with zeros."""

    def put(self, to: Array, x: Array, add: bool = False) -> None:
        """Copy (or add) `x` to `to`; both have one shape, and may have different dtypes."""

    def encode(self, to: Array, x: Array, wire: str) -> None:
        """Encode x (tokens, heads, elements) as bytes in `to`, see `a2d_mpi.core.wire.encode`."""

    def decode(self, to: Array, x: Array, wire: str) -> None:
        """Decode the bytes x to the tensor `to`; the inverse of `encode`."""

    def take(self, to: Array, x: Array, order: Array) -> None:
        """Set ``to[i] = x[order[i]]``; `order` is int64 and on this device."""

    def add_at(self, to: Array, x: Array, order: Array) -> None:
        """Add ``to[order[i]] += x[i]``; no index occurs twice."""

    def put_at(self, to: Array, x: Array, order: Array) -> None:
        """Set ``to[order[i]] = x[i]``; no index occurs twice."""

    def take_heads(self, to: Array, x: Array, first: int) -> None:
        """Copy heads of x, from `first` on, to `to`; both are (tokens, heads, elements)."""

    def put_heads(self, to: Array, x: Array, first: int, add: bool = False) -> None:
        """Copy (or add) all heads of x to heads of `to`, from `first` on; both have one dtype."""

    def merge(self, out: Array, lse: Array, compensation: Array, out2: Array, lse2: Array) -> None:
        """Merge (out2, lse2) into (out, lse): see `a2d_mpi.core.merge.merge`."""

    def add_sink(self, out: Array, lse: Array, sink: Array) -> None:
        """Merge a sink into (out, lse): see `a2d_mpi.core.merge.add_sink`."""

    def sink_gradient(self, lse: Array, delta: Array, sink: Array) -> Array:
        """Compute the gradient of a sink, (nheads,): see `a2d_mpi.core.merge.sink_gradient`."""

    def delta(self, dout: Array, out: Array) -> Array:
        """Compute ``rowsum(dout * out)``, (tokens, nheads) in the accumulation dtype."""

    def subtract(self, delta: Array, dlse: Array, lse: Array) -> None:
        """Subtract dlse from delta where lse is not -inf; all (tokens, nheads)."""

    def mark(self) -> Any:
        """Return a mark, which stands for the end of all work queued so far on this device."""

    def after(self, mark: Any) -> None:
        """Let work that is queued from now on begin after a mark of any stream."""

    def seconds(self, start: Any, end: Any) -> float:
        """Wait for the mark `end`; return the seconds from `start` to `end`."""
