"""Buffers that plans keep."""

from __future__ import annotations

import math
from weakref import WeakSet

import numpy as np

from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device

KEPT = 1024  # most views of buffers that a workspace keeps


class Views(dict):
    """A dict that a `WeakSet` can hold."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class Workspace:
    """Named buffers, which are allocated once and grow if a larger array is requested.

    Attributes
    ----------
    device : Device
    used : object
        Mark of the device at the end of the latest call that used the buffers; None before.
    """

    def __init__(self, device: Device = HOST) -> None:
        self.device, self.used = device, None
        self._buffers: dict[object, Array] = {}
        self._caches: WeakSet[Views] = WeakSet()
        # Views are kept, because making a view takes longer than a launch.
        self._views: dict[tuple, Array] = self.cache()

    def cache(self) -> Views:
        """Return a new dict for views of the buffers; it is emptied if a buffer is released."""
        self._caches.add(views := Views())
        return views

    def get(self, name: object, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
        """Return a contiguous array in the buffer `name`; its contents are undefined.

        All arrays of one name share memory.
        """
        key = name, shape, dtype
        if (view := self._views.get(key)) is not None:
            return view
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            if buffer is not None:  # release the old memory before new memory is allocated
                buffer = self._buffers.pop(name)
                self._forget()
                del buffer
            buffer = self._buffers[name] = self.device.empty((nbytes,), np.uint8)
        if len(self._views) == KEPT:  # the caller may use new shapes in every call
            self._views.clear()
        view = self._views[key] = buffer[:nbytes].view(dtype).reshape(shape)
        return view

    def nbytes(self, apart: str) -> int:
        """Return the bytes of all buffers, except buffers with names ``(apart, ...)``."""
        return sum(x.size for name, x in self._buffers.items() if name[0] != apart)

    def clear(self) -> None:
        """Release all buffers."""
        self._buffers.clear()
        self._forget()

    def _forget(self) -> None:
        for cache in self._caches:
            cache.clear()
