"""Let the ranks of a grid meet before each collective call."""

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
    """A collective call: all ranks make it together, or no rank makes it.

    Parameters
    ----------
    action : str
        One of `ACTIONS`.
    plan : int
        Number of the plan, counted from 1 in the order in which a grid's plans are made.
    number : int
        Number of this call of the plan, counted from 1.
    method : str
        Name of the plan's method, for messages.
    """

    action: str
    plan: int
    number: int
    method: str

    def __str__(self) -> str:
        called = f"{self.action} of plan {self.plan} ({self.method})"
        return called + f", call {self.number}" * (self.action != "making")


class Rendezvous:
    """The place where all ranks of a communicator meet before each collective call.

    Parameters
    ----------
    comm : Intracomm
        Communicator on which nothing else is sent.
    failures : Failures
        Failure detection of the grid.

    Attributes
    ----------
    watch : Watch
        Reports of ranks that wait for a long time.
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
        """Reserve the grid for one call; yield an error message if another thread had reserved it.

        Two threads that take turns are an error, because their order may differ between ranks.  If
        a rank dies in the context, call `settle` and raise `RanksLost`
        (`a2d_mpi.comm.failures.Failures.translated`).

        Raises
        ------
        CollectiveError
            If the grid was freed.  All ranks free a grid together, so all ranks raise this.
        """
        if self.comm == MPI.COMM_NULL:
            raise CollectiveError("the grid was freed")
        free = self._lock.acquire(blocking=False)
        if not free:
            self._lock.acquire()
        try:
            with self._failures.translated(settle):
                yield None if free else TWO_THREADS
        finally:
            self._lock.release()

    def meet(self, call: Call, flags: int = 0) -> int:
        """Wait until all ranks make the same call; return the bitwise or of their flags.

        Collective over the ranks.

        Raises
        ------
        CollectiveError
            If ranks make different calls.  The message has the call of each rank.
        """
        self.watch.doing = call
        stamp = (ACTIONS.index(call.action), call.plan, call.number)
        # Reduce a buffer, not an object.  mpi4py would reduce objects up a tree and send the
        # result down again, and the ranks would begin the call one after the other.
        self._buffer[:] = (flags, *stamp, *(~x for x in stamp))
        with self.watch.waiting("to begin"):
            self.comm.Allreduce(MPI.IN_PLACE, self._buffer, MPI.BOR)
        self.watch.calls += 1
        flags, *stamps = self._buffer.tolist()
        # If ranks differ in a bit, the bit is set in a stamp and in its complement.
        if any(x & y for x, y in zip(stamps[:3], stamps[3:])):
            calls: dict[str, list[int]] = {}
            for rank, text in enumerate(self.comm.allgather(str(call))):
                calls.setdefault(text, []).append(rank)
            listed = "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in calls.items())
            raise CollectiveError(f"ranks disagree on the call: {listed}")
        return flags

    def agree(self, problem: str | None, config: Mapping[str, object] = {}) -> None:
        """Call `a2d_mpi.comm.agreement.agree` on these ranks, after `meet`."""
        with self.watch.waiting("to agree"):
            agree(self.comm, problem, config)
