"""What the algorithms ask of a device besides attention itself."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray: the package works without the latter


class Device(Protocol):
    """A place for arrays: `a2d_mpi.devices.host.Host` or `a2d_mpi.devices.cuda.Cuda`.

    Attributes
    ----------
    name : str
        "cpu" or "gpu".
    description : str or None
        The device's own name; None on the host: the CPU's is for `a2d_mpi.experiments.origin` to
        find.
    """

    name: str
    description: str | None

    def owns(self, x: object) -> bool:
        """Whether `x` is an array of this device."""

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
        """New C-contiguous array, contents undefined."""

    def contiguous(self, x: Array) -> Array:
        """`x`, or a C-contiguous copy."""

    def upload(self, x: np.ndarray) -> Array:
        """A NumPy array, on this device."""

    def download(self, x: Array) -> np.ndarray:
        """An array of this device, as a NumPy array."""

    def finite(self, x: Array, lowest: bool = False) -> bool:
        """Whether no element is NaN or infinite; `lowest`: but for -inf."""

    def zero(self, x: Array) -> None:
        """Fill with zeros."""

    def put(self, to: Array, x: Array, add: bool = False) -> None:
        """Copy (or add) `x` to `to`, of the same shape, whatever the dtypes of tensors."""

    def take(self, to: Array, x: Array, order: Array) -> None:
        """``to[i] = x[order[i]]``, `order` int64 and uploaded."""

    def add_at(self, to: Array, x: Array, order: Array) -> None:
        """``to[order[i]] += x[i]``; no index occurs twice."""

    def put_at(self, to: Array, x: Array, order: Array) -> None:
        """``to[order[i]] = x[i]``; no index occurs twice."""

    def take_heads(self, to: Array, x: Array, first: int) -> None:
        """``to = x[:, first:]``, as many heads as `to` has; both (tokens, heads, elements)."""

    def put_heads(self, to: Array, x: Array, first: int, add: bool = False) -> None:
        """Copy (or add) x to the heads of `to` from `first` on; both of one dtype."""

    def merge(self, out: Array, lse: Array, rest: Array, out2: Array, lse2: Array) -> None:
        """`a2d_mpi.core.merge.merge`: (out2, lse2) into (out, lse)."""

    def delta(self, dout: Array, out: Array) -> Array:
        """``rowsum(dout * out)``, (tokens, nheads) in the compute dtype."""

    def mark(self) -> Any:
        """A point in time on this device: when all that was asked of it so far is done."""

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks; waits for the second."""
