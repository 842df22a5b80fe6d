"""Tensors and arrays of the same memory: NumPy arrays on a CPU, CuPy arrays on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import torch

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.devices.protocol import Array

BFLOAT16 = DTYPES["bfloat16"]


def array_of(x: torch.Tensor | None) -> Array | None:
    """The array of a tensor's memory; None stays None.

    Raises
    ------
    Exception
        If `x` is no tensor, or has no memory that NumPy or CuPy can use.
    """
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"must be a tensor, got {type(x).__name__}")
    if x.dtype == torch.bfloat16:  # which NumPy alone does not know
        return array_of(x.detach().view(torch.int16)).view(BFLOAT16)
    if x.is_cuda:
        import cupy

        return cupy.from_dlpack(x.detach())
    return x.detach().numpy()


def tensor_of(x: Array | None) -> torch.Tensor | None:
    """The tensor of an array's memory; None stays None."""
    if x is None:
        return None
    if x.dtype == BFLOAT16:
        return tensor_of(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else torch.from_dlpack(x)


@contextmanager
def current_stream() -> Iterator[None]:
    """Make PyTorch's current GPU and stream those of CuPy, if both are there."""
    if not torch.cuda.is_initialized() or find_spec("cupy") is None:
        yield
        return
    import cupy

    stream = torch.cuda.current_stream()
    with (
        cupy.cuda.Device(stream.device_index),
        cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index),
    ):
        yield
