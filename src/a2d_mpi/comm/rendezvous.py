"""The calls that all ranks of a grid make together; all of them follow one protocol.

A rank reserves its grid, checks its arguments, meets all other ranks, and agrees with them.  Only
then it sends messages of the call.  So an error of one rank is an error of all ranks, and no rank
waits for another rank that has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call, CollectiveError
from a2d_mpi.comm.failures import Failures
from a2d_mpi.comm.watch import Watch, name_ranks

ACTIONS = ("making", "forward", "backward", "scatter", "gather")
TWO_THREADS = "two threads called plans of one grid at once: give each thread a grid of its own"
INTERRUPTED = "an earlier call was interrupted: make a new grid and a new plan"


class Flags(NamedTuple):
    """Facts about the arrays and arguments of a rank, which it tells the others.

    Attributes
    ----------
    on_host : bool
        The arrays are NumPy arrays.  The same on all ranks.
    sink, dlse, max_logits, recorded : bool
        The call has this optional argument, and torch records gradients.  The same on all ranks.
    staged : bool
        Device arrays go through host memory.
    not_finite : bool
        An element is NaN or infinite.
    """

    on_host: bool = False
    sink: bool = False
    dlse: bool = False
    max_logits: bool = False
    recorded: bool = False
    staged: bool = False
    not_finite: bool = False


NO_FLAGS = Flags()
# The first flags must be the same on all ranks; they are called so in messages.
_SAME = (
    "the arrays: some ranks pass NumPy arrays, others CuPy arrays",
    *(f"{name}: some ranks pass it, others do not" for name in ("the sink", "dlse", "max_logits")),
    "gradients (torch.no_grad, requires_grad): some ranks pass it, others do not",
)


class Caller:
    """The base class of plans: their calls are collective over the ranks of a grid."""

    _number = 0  # of the plan, counted from 1 in the order in which a grid's plans are made
    _calls = -1  # number of the latest call; making the plan is call 0
    _interrupted = False  # an exception has left messages under way


class PlanCall(Call):
    """A collective call of a plan; see `ProcessGrid.call`.

    Attributes
    ----------
    watch : Watch
        Reports of ranks that wait for a long time.
    action, text : str
        One of `ACTIONS`; the call in messages.
    stamp : (int, int, int)
        Number of the action, of the plan and of its call, the same on all ranks.
    """

    def __init__(self, rendezvous: Rendezvous, action: str, plan: Caller) -> None:
        super().__init__(rendezvous.comm)
        self._rendezvous, self._plan, self.watch = rendezvous, plan, rendezvous.watch
        number, call = plan._number or rendezvous.plans + 1, plan._calls + 1
        self.action, self.stamp = action, (ACTIONS.index(action), number, call)
        self.text = f"{action} of plan {number} ({type(plan).__name__})"
        self.text += f", call {call}" * (call > 0)

    def agree(self, same: Mapping[str, object] = {}, flags: Flags = NO_FLAGS) -> Flags:
        """Wait until all ranks make this call, and raise the error of any rank on all of them.

        Parameters
        ----------
        same : mapping
            Values that must be the same on all ranks, by name; their texts are compared.
        flags : Flags

        Returns
        -------
        Flags
            Whether a flag is true on any rank.

        Raises
        ------
        CollectiveError
            If ranks make different calls, a rank has a problem, or values or flags differ.
        """
        problem, flags, differ = self._rendezvous.meet(self, flags)
        if problem or same:
            with self.watch.waiting("to agree"):
                super().agree(same)
        for text, differs in zip(_SAME, differ):
            if differs:
                raise CollectiveError(f"ranks disagree on {text}")
        plan = self._plan
        _, plan._number, plan._calls = self.stamp
        plan._interrupted = True  # an exception from here on leaves messages under way
        self._rendezvous.plans = max(self._rendezvous.plans, plan._number)
        return flags


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
        self._lock, self.plans = threading.Lock(), 0
        self._said = np.empty((2, 4 + len(NO_FLAGS)), np.int64)

    @contextmanager
    def call(self, action: str, plan: Caller, settle: Callable[[], None]) -> Iterator[PlanCall]:
        """Do the work of `ProcessGrid.call`."""
        if self.comm == MPI.COMM_NULL:
            raise CollectiveError("the grid was freed")
        free = self._lock.acquire(blocking=False)
        if not free:
            self._lock.acquire()
        try:
            call = PlanCall(self, action, plan)
            # Two threads that take turns are an error: their order may differ between ranks.
            if plan._interrupted or not free:
                call.problem = INTERRUPTED if free else TWO_THREADS
            yield call
            plan._interrupted = False
        except Exception as error:
            self._failures.translate(error, settle)
            raise
        finally:
            self._lock.release()

    def meet(self, call: PlanCall, flags: Flags) -> tuple[bool, Flags, list[int]]:
        """Wait until all ranks make the same call.  Collective over the ranks.

        Returns
        -------
        bool
            Whether any rank has a problem.
        Flags
            Whether a flag is true on any rank.
        list of int
            For each flag, whether it differs between ranks; empty if none differs.

        Raises
        ------
        CollectiveError
            If ranks make different calls.  The message has the call of each rank.
        """
        self.watch.doing = call.text  # not the call, which would keep the plan alive
        # Reduce a buffer, not an object.  mpi4py would reduce objects up a tree and send the
        # result down again, and the ranks would begin the call one after the other.
        self._said[0] = *call.stamp, call.problem is not None, *flags
        np.invert(self._said[0], self._said[1])
        own = self._said.tobytes()
        with self.watch.waiting("to begin"):
            self.comm.Allreduce(MPI.IN_PLACE, self._said, MPI.BOR)
        self.watch.calls += 1
        if self._said.tobytes() == own:  # all ranks say the same
            return call.problem is not None, flags, []
        said, inverted = self._said.tolist()
        # If ranks differ in a bit, the bit is set in a number and in its complement.
        differ = [x & y for x, y in zip(said, inverted)]
        if any(differ[:3]):
            calls: dict[str, list[int]] = {}
            for rank, text in enumerate(self.comm.allgather(call.text)):
                calls.setdefault(text, []).append(rank)
            listed = "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in calls.items())
            raise CollectiveError(f"ranks disagree on the call: {listed}")
        return bool(said[3]), Flags(*map(bool, said[4:])), differ[4:]
