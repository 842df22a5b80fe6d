"""Buffers that plans keep, and results that are remembered by the objects they follow from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device

KEPT = 1024  # objects whose results are remembered; a ring has as many as ranks


class Remembered:
    """Results that follow from objects that do not change, by the identity of the objects."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[object, Any]] = {}

    def get(
        self,
        x: object,
        make: Callable[[], Any],
        *options: int,
        keep: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Result of `make` for `x` and these options, from now or from an earlier call.

        It is remembered if `keep` then says so.
        """
        key = id(x), *options
        if key not in self._made:
            made = make()
            if not keep():
                return made
            if len(self._made) == KEPT:  # a caller who has new objects at every call
                self._made.clear()
            self._made[key] = x, made  # x is kept, too: no other object gets its id
        return self._made[key][1]


class Workspace:
    """Named buffers that are allocated once and grow when a larger one is asked for.

    Attributes
    ----------
    version : object
        Another one whenever a buffer was allocated or released.
    """

    def __init__(self, device: Device = HOST) -> None:
        self.device, self.version = device, object()
        self._buffers: dict[object, Array] = {}
        self._views: dict[tuple, Array] = {}  # making them anew takes longer than a launch

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
            self._views.clear()  # some may be of the buffer that goes
            buffer = self._buffers[name] = self.device.empty((nbytes,), np.uint8)
            self.version = object()
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
        self._views.clear()
        self.version = object()
