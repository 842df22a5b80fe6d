"""Streams of work that is done when somebody looks."""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque

import numpy as np

GPUS = int(os.environ.get("EMULATED_GPUS", "1"))
PATIENCE = 3  # an event is done when it is asked this often


class runtime:
    class CUDARuntimeError(RuntimeError):
        pass

    @staticmethod
    def getDeviceCount():
        if not GPUS:
            raise runtime.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return GPUS

    @staticmethod
    def getDeviceProperties(index):
        return {"name": b"emulated GPU"}


class Device:
    _current = 0

    def __init__(self, index=None):
        self.id = Device._current if index is None else index

    compute_capability = "90"

    def use(self):
        Device._current = self.id


class Stream:
    def __init__(self, non_blocking=False):
        self._work = deque()
        streams.append(self)

    ptr = 0

    def _enqueue(self, action):
        self._work.append(action)

    def _reach(self, action):
        """Do everything up to `action`."""
        if action in self._work:
            for _ in range(self._work.index(action) + 1):
                self._work.popleft()()
        if not any(stream._work for stream in streams):
            alive.clear()

    def wait_event(self, event):
        self._enqueue(event.synchronize)


streams: list[Stream] = []
# CuPy's memory pool gives freed memory to later work of the same stream only; here, what is queued
# may hold pointers to it, so all memory lives until nothing is queued.
alive: list[np.ndarray] = []
_default = Stream()


def get_current_stream():
    return _default


def drain():
    for stream in streams:
        while stream._work:
            stream._work.popleft()()
    alive.clear()


class Event:
    def __init__(self, disable_timing=False):
        self._asked, self._stream = 0, None

    def record(self, stream=None):
        self._stream = stream or _default

        def reached():
            self.time = time.perf_counter()

        self._action = reached
        self._stream._enqueue(reached)

    @property
    def done(self):
        self._asked += 1
        if self._asked >= PATIENCE:
            self.synchronize()
        return self._action not in self._stream._work

    def synchronize(self):
        self._stream._reach(self._action)


def get_elapsed_time(start, end):
    return 1e3 * (end.time - start.time)


class MemoryPointer:
    def __init__(self, host):
        self._bytes = host.reshape(-1).view(np.uint8)

    ptr = property(lambda self: self._bytes.ctypes.data)

    def memset_async(self, value, size, stream):
        stream._enqueue(lambda: self._bytes[:size].fill(value))

    def copy_from_device_async(self, src, size, stream):
        self._copy(self.ptr, src.ptr, size, stream)

    def copy_from_host_async(self, mem, size, stream):
        self._copy(self.ptr, mem, size, stream)

    def copy_to_host_async(self, mem, size, stream):
        self._copy(mem, self.ptr, size, stream)

    def _copy(self, to, source, size, stream):
        # The closure keeps the memory of this array alive.
        stream._enqueue(lambda: self._bytes.size and ctypes.memmove(to, source, size))


def alloc_pinned_memory(nbytes):
    return bytearray(nbytes)
