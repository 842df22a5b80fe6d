"""Arrays, their dtypes, and buffers."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

# 16-bit tensors are stored and sent as such; statistics, products and sums are float32.
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


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

    def clear(self) -> None:
        """Release all buffers."""
        self._buffers.clear()
