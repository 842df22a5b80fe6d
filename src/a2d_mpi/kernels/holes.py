"""Rows that nobody sees, or that see nothing: they may be NaN, which cuDNN multiplies by 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace


class Holes:
    """Clears such rows, in copies of tensors and in results.

    Parameters
    ----------
    device : Device
    work : Workspace
        Holds the copies.
    """

    def __init__(self, device: Any, work: Workspace) -> None:
        self._device, self._work = device, work
        self._constants: dict[int, Array] = {}

    def copy(self, name: object, x: Array, rows: slice, places: Array) -> Array:
        """Copy some rows to the buffer `name`; those at `places`, counted among them, are 0."""
        shape = rows.stop - rows.start, *x.shape[1:]
        found = self._work.get(("kernel", name), shape, x.dtype)
        self._device.put(found, x[rows])
        self.clear(found, places)
        return found

    def clear(self, x: Array, places: Array) -> None:
        """Set rows of x to 0."""
        nothing = self._work.get(("kernel", "nothing"), (len(places), *x.shape[1:]), x.dtype)
        self._device.zero(nothing)
        self._device.put_at(x, nothing, places)

    def fill(self, lse: Array, places: Array | None = None) -> None:
        """Set rows of lse, or all of them, to -inf, that of no keys."""
        if places is None:
            self._device.put(lse, self._nothing_seen(lse.shape))
        else:
            self._device.put_at(lse, self._nothing_seen((len(places), lse.shape[1])), places)

    def _nothing_seen(self, shape: tuple[int, int]) -> Array:
        """Array of -inf, (queries, nheads) float32; the largest one is kept."""
        n, nheads = shape
        found = self._constants.get(nheads)
        if found is None or len(found) < n:
            found = self._device.upload(np.full(shape, -np.inf, np.float32))
            self._constants[nheads] = found
        return found[:n]
