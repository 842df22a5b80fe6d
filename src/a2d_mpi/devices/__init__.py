"""Devices hold arrays: a device is the memory of this process, or a GPU.

The caller's arrays decide on the device: NumPy in, NumPy out; CuPy in, CuPy out.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device


def device_of(x: object, name: str = "x") -> Device:
    """Return the device of an array; raise ValueError if `x` is not a NumPy or CuPy array."""
    if type(x).__module__.split(".")[0] == "cupy":
        from a2d_mpi.devices.cuda import Cuda

        return Cuda.current()
    if HOST.owns(x) and not isinstance(x, np.ma.MaskedArray):  # its mask would be lost
        return HOST
    raise ValueError(f"{name} must be a NumPy or CuPy array, got {type(x).__name__}")
