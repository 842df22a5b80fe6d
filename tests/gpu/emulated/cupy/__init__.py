"""As much of CuPy as a2d_mpi uses, on the host: its kernels are compiled for the CPU.

Like a GPU, and unlike NumPy, it is lazy and strict.  Nothing that is queued on a stream happens
before somebody waits for it, or asks for it often enough: whoever gives a buffer to MPI too early
sends garbage.  Arrays do not mix with NumPy's, and have only what they need.
"""

from __future__ import annotations

import numpy as np

from . import cuda
from .arithmetic import Arithmetic, functions, garbage
from .kernels import RawModule

__all__ = ["RawModule", "asarray", "ascontiguousarray", "asnumpy", "cuda", "empty", "ndarray"]


class ndarray(Arithmetic):
    """An array in "device" memory."""

    def __init__(self, host):
        self._host = host
        cuda.alive.append(host)

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    device = property(lambda self: cuda.Device())
    data = property(lambda self: cuda.MemoryPointer(self._host))

    def reshape(self, *shape):
        found = self._host.reshape(*shape)
        assert np.shares_memory(found, self._host) or not found.size, "reshape would copy"
        return ndarray(found)

    def view(self, dtype):
        return ndarray(self._host.view(dtype))

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    @property
    def __cuda_array_interface__(self):
        assert self._host.flags.c_contiguous
        return self._host.__array_interface__ | {"version": 2, "strides": None}


def empty(shape, dtype=float):
    return ndarray(garbage(shape, dtype))


def asarray(x):
    if isinstance(x, ndarray):
        return x
    assert type(x) is np.ndarray
    return ndarray(np.array(x, order="C"))


def asnumpy(x):
    cuda.drain()
    return x._host.copy()


def ascontiguousarray(x):
    if x._host.flags.c_contiguous:
        return x
    to = ndarray(np.empty(x.shape, x.dtype))
    cuda.get_current_stream()._enqueue(lambda: np.copyto(to._host, x._host))
    return to


globals().update(functions(ndarray))
