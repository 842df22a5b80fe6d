"""Buffers and constant arrays that plans keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device

KEPT = 1024  # views of buffers that are kept


class Constant:
    """An array on the host that does not change, copied to each device once."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._copies: dict[Device, Array] = {}

    def on(self, device: Device) -> Array:
        """The array on a device."""
        if device not in self._copies:
            self._copies[device] = device.upload(self._array)
        return self._copies[device]


class Workspace:
    """Named buffers that are allocated once and grow when a larger one is asked for."""

    def __init__(self, device: Device = HOST) -> None:
        self.device = device
        self._buffers: dict[object, Array] = {}
        self._caches: list[dict] = []
        # Making views anew takes longer than a launch.
        self._views: dict[tuple, Array] = self.cache()

    def cache(self) -> dict:
        """Make a dict for views of the buffers: it is emptied when a buffer goes."""
        self._caches.append({})
        return self._caches[-1]

    def get(self, name: object, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
        """Contiguous array in the buffer `name`; its contents are undefined.

        All arrays of one name share memory.
        """
        key = name, shape, dtype
        if (found := self._views.get(key)) is not None:
            return found
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            if buffer is not None:  # its memory is free before more is taken
                buffer = self._buffers.pop(name)
                self._forget()
                del buffer
            buffer = self._buffers[name] = self.device.empty((nbytes,), np.uint8)
        if len(self._views) == KEPT:  # a caller who has new shapes at every call
            self._views.clear()
        found = self._views[key] = buffer[:nbytes].view(dtype).reshape(shape)
        return found

    def parcel(
        self, name: object, like: Sequence[tuple[tuple[int, ...], np.dtype]]
    ) -> tuple[Array, list[Array]]:
        """Tensors that travel in one message: the buffer `name`, and contiguous views of it.

        Parameters
        ----------
        name : object
        like : sequence of (shape, dtype)
            Shapes and dtypes of the tensors, which fill the buffer without gaps.

        Returns
        -------
        whole : (bytes,) uint8
        tensors : list of arrays
            Their contents are undefined.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in like]
        whole, start = self.get(name, (sum(sizes),), np.uint8), 0
        tensors: list[Any] = [None] * len(like)
        # Tensors of large elements come first: all are aligned then.
        for i in sorted(range(len(like)), key=lambda i: -like[i][1].itemsize):
            shape, dtype = like[i]
            tensors[i] = whole[start : start + sizes[i]].view(dtype).reshape(shape)
            start += sizes[i]
        return whole, tensors

    def nbytes(self, apart: str) -> int:
        """Bytes of all buffers, apart from those named ``(apart, ...)``."""
        return sum(x.size for name, x in self._buffers.items() if name[0] != apart)

    def clear(self) -> None:
        """Release all buffers."""
        self._buffers.clear()
        self._forget()

    def _forget(self) -> None:
        for cache in self._caches:
            cache.clear()
