"""Meetings of the ranks of a grid, before each collective call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.agreement import CollectiveError, agree
from a2d_mpi.comm.failures import Failures
from a2d_mpi.comm.watch import Watch, name_ranks

ACTIONS = ("making", "forward", "backward", "scatter", "gather")
TWO_THREADS = "two threads called plans of one grid at once: give each thread a grid of its own"


class Call(NamedTuple):
    """A collective call: all ranks make it together, or none does.

    Parameters
    ----------
    action : str
        One of `ACTIONS`.
    plan : int
        Number of the plan, counted from 1 in the order in which a grid's plans are made.
    number : int
        Of this call of the plan, counted from 1.
    method : str
        The plan in a word, for messages.
    """

    action: str
    plan: int
    number: int
    method: str

    def __str__(self) -> str:
        called = f"{self.action} of plan {self.plan} ({self.method})"
        return called + f", call {self.number}" * (self.action != "making")


class Rendezvous:
    """The meetings of all ranks of a communicator, one call after the other.

    Parameters
    ----------
    comm : Intracomm
        Nothing else is sent on it.
    failures : Failures
        Of the grid.

    Attributes
    ----------
    watch : Watch
        Reports ranks that wait for long.
    plans : int
        Number of plans made so far on these ranks.
    """

    def __init__(self, comm: MPI.Intracomm, failures: Failures) -> None:
        self.comm, self.watch, self._failures = comm, Watch(comm), failures
        self._lock = threading.Lock()
        self._buffer = np.empty(7, np.int64)
        self.plans = 0

    @contextmanager
    def turn(self, settle: Callable[[], None] = lambda: None) -> Iterator[str | None]:
        """Take the turn for one call; yields an error if another thread had it.

        Threads that take turns may do so in another order on another rank.  If a rank dies in the
        block, it raises `RanksLost`, after `settle`; see `a2d_mpi.comm.failures`.
        """
        free = self._lock.acquire(blocking=False)
        if not free:
            self._lock.acquire()
        try:
            with self._failures.noticed(settle):
                yield None if free else TWO_THREADS
        finally:
            self._lock.release()

    def meet(self, call: Call, flags: int = 0) -> int:
        """Wait until all ranks make the same call; returns the flags of all, or-ed.

        Collective over the ranks.

        Raises
        ------
        CollectiveError
            If they do not make the same call, with the call of each.
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
        """Call `a2d_mpi.comm.agreement.agree` on these ranks, after they have met."""
        with self.watch.waiting("to agree"):
            agree(self.comm, problem, config)
