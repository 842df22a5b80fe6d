"""The dtypes of tensors, and the dtypes of computations with them."""

from __future__ import annotations

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
    """Return the NumPy dtype of a name or dtype; raise ValueError if tensors cannot have it."""
    try:
        tensor_dtype = DTYPES.get(str(dtype)) or np.dtype(dtype)
    except (TypeError, SyntaxError):
        tensor_dtype = None
    # NumPy takes None for float64, also in comparisons.
    if dtype is None or tensor_dtype is None or tensor_dtype not in DTYPES.values():
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {dtype!r}")
    return tensor_dtype


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """Return the accumulation dtype of tensors of `dtype`: float32 or float64."""
    return np.result_type(dtype, np.float32)
