"""Clearing of masked rows and masked keys: they may be NaN, and cuDNN multiplies them by 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace


class MaskedRows:
    """Functions that clear masked rows in copies of tensors and in results.

    Parameters
    ----------
    device : Device
    work : Workspace
        Buffers of the copies.
    """

    def __init__(self, device: Any, work: Workspace) -> None:
        self._device, self._work = device, work
        self._constants: dict[int, Array] = {}

    def copy(self, name: object, x: Array, rows: slice, places: Array) -> Array:
        """Copy rows to the buffer `name`; set the rows at `places`, counted in the copy, to 0."""
        shape = rows.stop - rows.start, *x.shape[1:]
        cleared = self._work.get(("kernel", name), shape, x.dtype)
        self._device.put(cleared, x[rows])
        self.clear(cleared, places)
        return cleared

    def clear(self, x: Array, places: Array) -> None:
        """Set the rows of x at `places` to 0."""
        zeros = self._work.get(("kernel", "nothing"), (len(places), *x.shape[1:]), x.dtype)
        self._device.zero(zeros)
        self._device.put_at(x, zeros, places)

    def fill(self, lse: Array, places: Array | None = None) -> None:
        """Set the rows of lse at `places`, or all rows, to -inf, the lse of no keys."""
        if places is None:
            self._device.put(lse, self._minus_infinity(lse.shape))
        else:
            self._device.put_at(lse, self._minus_infinity((len(places), lse.shape[1])), places)

    def _minus_infinity(self, shape: tuple[int, int]) -> Array:
        """Return an array of -inf, (queries, nheads) float32; the largest array is kept."""
        n, nheads = shape
        kept = self._constants.get(nheads)
        if kept is None or len(kept) < n:
            kept = self._device.upload(np.full(shape, -np.inf, np.float32))
            self._constants[nheads] = kept
        return kept[:n]
