"""Tensors and arrays that share memory: NumPy arrays on a CPU, CuPy arrays on a GPU."""

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
    """Return an array of a tensor's memory; None stays None.

    Raises
    ------
    Exception
        If `x` is not a tensor, or NumPy or CuPy cannot use its memory.
    """
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"must be a tensor, got {type(x).__name__}")
    if x.dtype == torch.bfloat16:  # PyTorch does not export bfloat16 to NumPy
        return array_of(x.detach().view(torch.int16)).view(BFLOAT16)
    if x.is_cuda:
        import cupy

        return cupy.from_dlpack(x.detach())
    return x.detach().numpy()


def tensor_of(x: Array | None) -> torch.Tensor | None:
    """Return a tensor of an array's memory; None stays None."""
    if x is None:
        return None
    if x.dtype == BFLOAT16:
        return tensor_of(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else torch.from_dlpack(x)


@contextmanager
def current_stream() -> Iterator[None]:
    """Make PyTorch's current GPU and stream current in CuPy, too, if CuPy and a GPU are in use."""
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


def check_range(most: float, **arrays: np.ndarray) -> None:
    """Raise ValueError if an array has a number below 0, or above `most`."""
    for name, x in arrays.items():
        wrong = np.argwhere((x < 0) | (x > most))
        if len(wrong):
            place = tuple(wrong[0])
            index = ", ".join(map(str, place))
            raise ValueError(f"{name}[{index}] must be 0 to {most}, got {x[place]}")
