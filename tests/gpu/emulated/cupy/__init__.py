"""As much of CuPy as a2d_mpi uses, on the host: its kernels are compiled for the CPU.

Like a GPU, and unlike NumPy, it is lazy and strict.  Nothing that is queued on a stream happens
before somebody waits for it, or asks for it often enough: whoever gives a buffer to MPI too early
sends garbage.  Arrays do not mix with NumPy's, and have only what they need.
"""

from __future__ import annotations

import operator

import numpy as np

from . import cuda
from .kernels import RawModule

__all__ = ["RawModule", "asarray", "ascontiguousarray", "asnumpy", "cuda", "empty", "ndarray"]


class ndarray:
    """An array in "device" memory; `_host` is its NumPy array."""

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

    def copy(self):
        to = empty(self.shape, self.dtype)
        _queue(lambda: np.copyto(to._host, self._host))
        return to

    def __len__(self):
        return len(self._host)

    def __getitem__(self, index):
        return ndarray(self._host[_whole(index)])

    def __setitem__(self, index, value):
        index = index._host if isinstance(index, ndarray) else _whole(index)
        value = value._host if isinstance(value, ndarray) else value
        _queue(lambda: operator.setitem(self._host, index, value))

    def fill(self, value):
        _queue(lambda: self._host.fill(value))

    def __iadd__(self, other):
        _queue(lambda: np.add(self._host, other._host, out=self._host))
        return self

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    @property
    def __cuda_array_interface__(self):
        assert self._host.flags.c_contiguous
        return self._host.__array_interface__ | {"version": 2, "strides": None}


def _whole(index):
    """With an ellipsis NumPy gives a view also of a single element."""
    index = index if isinstance(index, tuple) else (index,)
    return index if any(x is Ellipsis for x in index) else (*index, Ellipsis)


def _queue(action):
    cuda.get_current_stream()._enqueue(action)


def empty(shape, dtype=float):
    """Memory that nobody has written: not the zeros that a fresh page holds."""
    found = np.empty(shape, dtype)
    found.reshape(-1).view(np.uint8).fill(0xFF)
    return ndarray(found)


def asarray(x):
    if isinstance(x, ndarray):
        return x
    assert type(x) is np.ndarray
    return ndarray(np.array(x, order="C"))


def asnumpy(x):
    cuda.drain()
    return x._host.copy()


def ascontiguousarray(x):
    return x if x._host.flags.c_contiguous else x.copy()
