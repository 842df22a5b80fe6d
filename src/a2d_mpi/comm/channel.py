"""Messages on one communicator: posted early, counted and timed.

Tensors travel in point-to-point messages only.  Sender and receiver know the size of a message
from the distribution.  So ranks need not agree on sizes, and an empty shard costs no message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.transport import Transport
from a2d_mpi.comm.watch import Watch
from a2d_mpi.devices.protocol import Array


class Traffic:
    """Bytes that this rank sent and received, by phase and communicator.

    Attributes
    ----------
    bytes : dict
        ``{(phase, communicator): [sent, received]}`` with keys such as ``("forward", "row")``.
    messages : dict
        Numbers of messages, with the same keys and values.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything counted so far."""
        self.bytes, self.messages = {}, {}

    def count(self, phase: str, name: str, direction: int, nbytes: int, messages: int) -> None:
        """Count the bytes and messages of a tensor; `direction` is 0 for sent, 1 for received."""
        self.bytes.setdefault((phase, name), [0, 0])[direction] += nbytes
        self.messages.setdefault((phase, name), [0, 0])[direction] += messages


class Channel:
    """Nonblocking messages on one communicator, counted and timed.

    Parameters
    ----------
    comm : Intracomm
    name : str
        Name of the communicator in the counters: "row", "col", ...
    traffic : Traffic
        The counters.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, traffic: Traffic) -> None:
        self.comm, self.name, self.traffic = comm, name, traffic
        self.rank, self.phase = comm.rank, ""
        # Start and end of each `wait`, in seconds of time.perf_counter: exposed communication.
        self.waits: list[tuple[float, float]] = []

    def begin_phase(self, phase: str, transport: Transport, watch: Watch) -> None:
        """Begin a phase: later messages count towards it, and `waits` starts empty."""
        self.phase, self.waits, self._transport, self._watch = phase, [], transport, watch

    def isend(self, tensors: Sequence[Array], peer: int, tag: int) -> list[Any]:
        """Start sending C-contiguous tensors, with tags from `tag` on.

        The tensors must not change until `wait` has completed the returned messages.
        """
        return self._post(self._transport.send, 0, tensors, peer, tag)

    def irecv(self, tensors: Sequence[Array], peer: int, tag: int) -> list[Any]:
        """Start receiving into C-contiguous tensors, with tags from `tag` on."""
        return self._post(self._transport.receive, 1, tensors, peer, tag)

    def wait(self, messages: list[Any]) -> None:
        """Block until the messages are complete, and empty the list."""
        start = time.perf_counter()
        with self._watch.waiting(f"for messages ({self.name})"):
            self._transport.wait(messages)
        self.waits.append((start, time.perf_counter()))

    def _post(
        self, post: Callable, direction: int, tensors: Sequence[Array], peer: int, tag: int
    ) -> list[Any]:
        """Start and count the messages of the tensors; `direction` is as in `Traffic.count`."""
        started = []
        for t, tensor in enumerate(tensors, tag):
            if tensor.size:
                # MPI has no bfloat16; bytes suffice because MPI reduces nothing here.
                flat = tensor.reshape(-1).view(np.uint8)
                messages = -(-flat.size // self._transport.limit)
                self.traffic.count(self.phase, self.name, direction, flat.size, messages)
                started += post(self.comm, flat, peer, t)
        return started
