"""Streams of work that is done when somebody looks."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections import deque

import numpy as np

GPUS = int(os.environ.get("EMULATED_GPUS", "1"))
PATIENCE = 3  # an event is done when it is asked this often


STATUS = {
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
}


class runtime:
    class CUDARuntimeError(RuntimeError):
        def __init__(self, status):
            self.status = status
            super().__init__(STATUS[status])

    @staticmethod
    def getDeviceCount():
        if not GPUS:
            raise runtime.CUDARuntimeError(100)
        return GPUS

    @staticmethod
    def eventQuery(event):
        """A status, whatever it is: CuPy raises no error here."""
        return fault.status or (0 if _events[event].done else 600)

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


class fault:
    """What ends all work of the process for good: events after it are never done."""

    kernel = None  # the name of one that makes an illegal access
    status = 0


BLOCKED = object()  # returned by an action that cannot be done yet


class Stream:
    def __init__(self, non_blocking=False):
        self._work = deque()
        streams.append(self)

    ptr = 0

    def _enqueue(self, action):
        self._work.append(action)

    def _reach(self, action):
        """Do everything up to `action`, in order; returns whether it could be done."""
        while action in self._work:
            if fault.status or self._work[0]() is BLOCKED:
                return False
            self._work.popleft()
        if not any(stream._work for stream in streams):
            alive.clear()
        return True

    def synchronize(self):
        if self._work:
            _wait(self, self._work[-1])

    def __enter__(self):
        _current.append(self)

    def __exit__(self, *_):
        _current.pop()

    def wait_event(self, event):
        self._enqueue(lambda: None if event._reached() else BLOCKED)


streams: list[Stream] = []
# CuPy's memory pool gives freed memory to later work of the same stream only; here, what is queued
# may hold pointers to it, so all memory lives until nothing is queued.
alive: list[np.ndarray] = []
_current = [Stream()]


def get_current_stream():
    return _current[-1]


def drain():
    for stream in streams:
        stream.synchronize()
    alive.clear()


def _wait(stream, action):
    if not stream._reach(action):
        assert fault.status, "waits for work that cannot be done"
        raise runtime.CUDARuntimeError(fault.status)


_events = weakref.WeakValueDictionary()


class Event:
    def __init__(self, disable_timing=False):
        self._asked, self._stream = 0, None
        _events[self.ptr] = self

    ptr = property(id)

    def record(self, stream=None):
        self._stream = stream or get_current_stream()

        def reached():
            self.time = time.perf_counter()

        self._action = reached
        self._stream._enqueue(reached)

    @property
    def done(self):
        self._asked += 1
        if self._asked >= PATIENCE:
            self._reached()
        return self._action not in self._stream._work

    def _reached(self):
        return self._stream._reach(self._action)

    def synchronize(self):
        _wait(self._stream, self._action)


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
