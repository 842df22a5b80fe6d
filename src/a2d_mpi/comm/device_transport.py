"""Messages of device memory: directly, or through page-locked host memory.

Every MPI sends host memory, and a CUDA-aware MPI also sends device memory.  With another MPI, a
tensor of the device goes through page-locked host memory in pieces: one piece is copied while
other pieces are sent.

Kernels are queued, and read and write device memory later.  So a message of device memory has to
wait for earlier kernels, for copies, and for MPI.  Each message is a generator that yields while
it waits.  All messages advance whenever this rank waits for any message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.transport import Transport, pieces
from a2d_mpi.devices.protocol import Array

if TYPE_CHECKING:  # this module needs CuPy
    from a2d_mpi.devices.cuda import Cuda

STAGED_MESSAGE = 4 << 20  # bytes of a piece that is copied through the host


class DeviceTransport(Transport):
    """The transport of device memory.

    Parameters
    ----------
    device : Cuda
    staged : bool
        Whether messages go through page-locked host memory.  Otherwise MPI gets device memory.

    Attributes
    ----------
    staged_bytes : int
        Bytes copied between device and host so far.
    """

    def __init__(self, device: Cuda, staged: bool) -> None:
        super().__init__()
        self.device, self.staged = device, staged
        self.staged_bytes = self._number = 0
        self._active: dict[int, Iterator[None]] = {}
        self._pinned: dict[int, list[np.ndarray]] = {}
        self.limit = STAGED_MESSAGE if staged else self.limit

    def send(self, comm: MPI.Intracomm, x: Array, peer: int, tag: int) -> list[Any]:
        send = self._send_staged if self.staged else self._direct
        return self._begin(send(comm.Isend, x, peer, tag, self.device.mark()))

    def receive(self, comm: MPI.Intracomm, x: Array, peer: int, tag: int) -> list[Any]:
        receive = self._receive_staged if self.staged else self._direct
        return self._begin(receive(comm.Irecv, x, peer, tag, self.device.mark()))

    def wait(self, messages: list[Any]) -> None:
        # Advance all messages: the rank that this one waits for may need another of them.
        while not self._active.keys().isdisjoint(messages):
            self._advance()
        self._forget(messages)

    def settle(self) -> None:
        super().settle()
        self._active = {}

    def poll(self, comm: MPI.Intracomm) -> None:
        self._advance()

    def _begin(self, message: Iterator[None]) -> list[int]:
        self._number += 1
        if _goes_on(message):
            self._active[self._number] = message
        return [self._number]

    def _advance(self) -> None:
        for number in [n for n, message in self._active.items() if not _goes_on(message)]:
            del self._active[number]

    # The event `ready` comes after the kernels that write x (sends), or that read its old contents
    # (receives).

    def _direct(self, post, x, peer, tag, ready) -> Iterator[None]:
        while not self.device.done(ready):
            yield
        requests = [self._post(post, piece, peer, tag) for piece in pieces(x, self.limit)]
        while not MPI.Request.Testall(requests):
            yield

    def _send_staged(self, post, x, peer, tag, ready) -> Iterator[None]:
        host = self._borrow(x.nbytes)
        # Queue all copies now: messages are sent in the order of the kernels that write them.
        copied = [
            (piece, self.device.copy(piece, from_device, ready))
            for piece, from_device in zip(pieces(host, self.limit), pieces(x, self.limit))
        ]
        self.staged_bytes += x.nbytes
        requests = []
        for piece, done in copied:  # the pieces share a tag, so they are sent in order
            while not self.device.done(done):
                yield
            requests.append(self._post(post, piece, peer, tag))
        while not MPI.Request.Testall(requests):
            yield
        self._pinned[host.nbytes].append(host)

    def _receive_staged(self, post, x, peer, tag, ready) -> Iterator[None]:
        host = self._borrow(x.nbytes)
        waiting = [
            (self._post(post, piece, peer, tag), piece, to)
            for piece, to in zip(pieces(host, self.limit), pieces(x, self.limit))
        ]
        done = None
        for request, piece, to in waiting:
            while not request.Test():
                yield
            # Wait here.  If the stream waited for `ready`, copies of other messages would wait.
            while not self.device.done(ready):
                yield
            done = self.device.copy(to, piece)
            self.staged_bytes += piece.nbytes
        # The copies run in order, so all are done when the last one is done.
        while done is not None and not self.device.done(done):
            yield
        self._pinned[host.nbytes].append(host)

    def _borrow(self, nbytes: int) -> np.ndarray:
        free = self._pinned.setdefault(nbytes, [])
        return free.pop() if free else self.device.pinned(nbytes)


def _goes_on(message: Iterator[None]) -> bool:
    return next(message, StopIteration) is None
