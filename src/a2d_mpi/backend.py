"""Arrays and buffers."""

from __future__ import annotations

import math

import numpy as np


class Workspace:
    """Named buffers that are allocated once and grow when a larger one is asked for."""

    def __init__(self) -> None:
        self._buffers: dict[object, np.ndarray] = {}

    def get(self, name: object, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        """Contiguous array in the buffer `name`; its contents are undefined.

        The array shares memory with every other one got under the same name.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(b.nbytes for b in self._buffers.values())
