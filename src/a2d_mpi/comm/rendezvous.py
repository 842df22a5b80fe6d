"""Where the ranks of a grid meet before they do anything together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.agreement import CollectiveError, agree
from a2d_mpi.comm.watch import Watch, name_ranks

ACTIONS = ("making", "forward", "backward")
TWO_THREADS = "two threads called plans of one grid at once: give each thread a grid of its own"


class Call(NamedTuple):
    """A collective call: that all ranks make together, or none does.

    Parameters
    ----------
    action : str
        One of `ACTIONS`.
    plan : int
        Number of the plan, counted from 1 in the order in which a grid's plans are made.
    number : int
        Of this call of the plan, counted from 1.
    kind : str
        The plan in a word, for messages.
    """

    action: str
    plan: int
    number: int
    kind: str

    def __str__(self) -> str:
        called = f"{self.action} of plan {self.plan} ({self.kind})"
        return called + f", call {self.number}" * (self.action != "making")


class Rendezvous:
    """The meetings of all ranks of a communicator, one call after the other.

    Parameters
    ----------
    comm : Intracomm
        Nothing else is sent on it.

    Attributes
    ----------
    watch : Watch
        Tells when ranks wait for long.
    plans : int
        Made so far on these ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.watch = comm, Watch(comm)
        self._lock = threading.Lock()
        self._buffer = np.empty(7, np.int64)
        self.plans = 0

    @contextmanager
    def turn(self) -> Iterator[str | None]:
        """One call at a time; yields what is wrong: another thread was in the middle of one.

        Threads that take turns may do so in another order on another rank.
        """
        free = self._lock.acquire(blocking=False)
        if not free:
            self._lock.acquire()
        try:
            yield None if free else TWO_THREADS
        finally:
            self._lock.release()

    def meet(self, call: Call, flags: int = 0) -> int:
        """Wait for all ranks to make the same call; returns the flags of all, or-ed.

        Collective over the ranks.

        Raises
        ------
        CollectiveError
            If they do not make the same call, with who makes which.
        """
        self.watch.doing = call
        stamp = (ACTIONS.index(call.action), call.plan, call.number)
        # As a buffer: an object would be pickled, reduced up a tree and sent down again, and the
        # ranks would set out one after the other.
        self._buffer[:] = (flags, *stamp, *(~x for x in stamp))
        with self.watch.waiting("to begin"):
            self.comm.Allreduce(MPI.IN_PLACE, self._buffer, MPI.BOR)
        self.watch.calls += 1
        flags, *found = self._buffer.tolist()
        # A bit that is set on one rank and not on another appears in both halves.
        if any(x & y for x, y in zip(found[:3], found[3:])):
            makes: dict[str, list[int]] = {}
            for rank, text in enumerate(self.comm.allgather(str(call))):
                makes.setdefault(text, []).append(rank)
            who = "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in makes.items())
            raise CollectiveError(f"ranks disagree on the call: {who}")
        return flags

    def agree(self, problem: str | None, config: Mapping[str, object] = {}) -> None:
        """`a2d_mpi.comm.agreement.agree` of these ranks, after they have met."""
        with self.watch.waiting("to agree"):
            agree(self.comm, problem, config)
