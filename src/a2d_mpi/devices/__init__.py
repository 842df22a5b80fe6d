"""Where arrays live: in the memory of this process, or on a GPU.

It follows from the arrays that the caller passes: NumPy in, NumPy out; CuPy in, CuPy out.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device


def device_of(x: object) -> Device:
    """The device that `x` lives on; TypeError if it is no array of a known kind."""
    if type(x).__module__.split(".")[0] == "cupy":
        from a2d_mpi.devices.cuda import Cuda

        return Cuda.current()
    if HOST.owns(x) and not isinstance(x, np.ma.MaskedArray):  # whose mask would be lost
        return HOST
    raise TypeError(f"must be a NumPy or CuPy array, got {type(x).__name__}")
