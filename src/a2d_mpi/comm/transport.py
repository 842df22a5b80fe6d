"""The transport of host memory, which passes tensors to MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from a2d_mpi.core.sizes import MAX_MESSAGE
from a2d_mpi.devices.protocol import Array

# MPI moves large messages only inside its calls.  So a kernel that occupies the core polls MPI
# between its cache blocks.  (A polling thread was slower.)
PERIOD = 1e-3  # longest rest after a poll, in seconds
# The rest after a poll is REST times as long as the poll.  With more ranks than cores, Open MPI
# yields the core if a poll finds nothing.  If other processes want the core, this takes
# milliseconds.  Rests save a seventh of both phases (4 ranks on 2 busy cores, 12 heads of 32, 1536
# causal tokens).
REST = 10


class Transport:
    """The path from host memory to MPI, which sends and receives it directly.

    `Channel` posts and counts the messages.

    Attributes
    ----------
    limit : int
        Size of the largest message in bytes.
    """

    limit = MAX_MESSAGE
    _next_poll = 0.0

    def __init__(self) -> None:
        self._requests: list[MPI.Request] = []  # MPI may still read or write their memory

    def send(self, comm: MPI.Intracomm, x: Array, peer: int, tag: int) -> list[Any]:
        """Start sending bytes (C-contiguous, uint8); return messages for `wait`."""
        return [self._post(comm.Isend, piece, peer, tag) for piece in pieces(x, self.limit)]

    def receive(self, comm: MPI.Intracomm, x: Array, peer: int, tag: int) -> list[Any]:
        """Start receiving bytes into x (C-contiguous, uint8); return messages for `wait`."""
        return [self._post(comm.Irecv, piece, peer, tag) for piece in pieces(x, self.limit)]

    def poll(self, comm: MPI.Intracomm) -> None:
        """Let messages advance; kernels call it between the cache blocks of a computation."""
        start = time.perf_counter()
        if start >= self._next_poll:
            # Any MPI call advances messages.  The cost of Iprobe does not depend on their number.
            comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            end = time.perf_counter()
            self._next_poll = end + min(PERIOD, REST * (end - start))

    def wait(self, messages: list[Any]) -> None:
        """Block until the messages are complete, and empty the list."""
        # Not Waitall: it frees failed sends, and Open MPI 5.0.11 ends a process that frees one.
        for request in messages:
            request.Wait()
        self._forget(messages)

    def settle(self) -> None:
        """Complete all messages under way, after their communicators were revoked."""
        for request in self._requests:
            with suppress(MPI.Exception):
                request.Wait()
        self._requests = []

    def _post(self, start: Callable[..., MPI.Request], *operands: Any) -> MPI.Request:
        """Start a message by a method of a communicator, and keep its request."""
        self._requests.append(start(*operands))
        return self._requests[-1]

    def _forget(self, messages: list[Any]) -> None:
        self._requests = [request for request in self._requests if request]  # MPI nulls others
        messages.clear()


def pieces(x: Array, size: int) -> list[Array]:
    """Cut an array into consecutive pieces of at most `size` elements."""
    return [x[start : start + size] for start in range(0, len(x), size)]
