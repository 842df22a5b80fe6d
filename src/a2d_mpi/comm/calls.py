"""Calls of plans, which are collective over the ranks of a grid.

All state of a plan's calls is written here.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, NoReturn
from weakref import WeakValueDictionary

from mpi4py import MPI

from a2d_mpi.comm.agreement import Call, CollectiveError
from a2d_mpi.comm.survival import NoFailures
from a2d_mpi.comm.watch import Watch, by_text

if TYPE_CHECKING:
    from a2d_mpi.comm.grid import ProcessGrid

ACTIONS = ("making", "forward", "backward", "scatter", "gather")
TWO_THREADS = "two threads called plans of one grid at once: give each thread a grid of its own"
INTERRUPTED = "an earlier call was interrupted: make a new grid and a new plan"


class Flags(NamedTuple):
    """Facts about the arrays and arguments of a rank, which it tells the others.

    Attributes
    ----------
    on_host : bool
        The arrays are NumPy arrays.  The same on all ranks.
    sink, dlse, recorded : bool
        The call has this optional argument, and torch records gradients.  The same on all ranks.
    staged : bool
        Device arrays go through host memory.
    not_finite : bool
        An element is NaN or infinite.
    """

    on_host: bool = False
    sink: bool = False
    dlse: bool = False
    recorded: bool = False
    staged: bool = False
    not_finite: bool = False


NO_FLAGS = Flags()
# The first flags must be the same on all ranks; they are called so in messages.
_SAME = (
    "the arrays: some ranks pass NumPy arrays, others CuPy arrays",
    *(f"{name}: some ranks pass it, others do not" for name in ("the sink", "dlse")),
    "gradients (torch.no_grad, requires_grad): some ranks pass it, others do not",
)


class Caller:
    """The base class of plans: their calls are collective over the ranks of a grid.

    Attributes
    ----------
    serial : int
        Number of the plan in this process, by which `PLANS` finds it.  Local.
    """

    grid: ProcessGrid
    serial = 0
    _number = 0  # of the plan, counted from 1 in the order in which plans are made on all ranks
    _calls = -1  # number of the latest call; making the plan is call 0
    _interrupted = False  # an exception has left messages under way

    def refuse(self, problem: str, phase: str = "forward") -> NoReturn:
        """Take part in a call without arguments, so that all ranks raise a ValueError.

        A caller uses this when it cannot make the arguments of a call that other ranks make.

        Parameters
        ----------
        problem : str
            Message of the error: the problem of this rank.
        phase : {"forward", "backward"}
            The call that the other ranks make.

        Raises
        ------
        ValueError
            On all ranks, with `problem`.
        """
        with self.grid.call(phase, self) as call:
            call.problem = call.problem or problem
            call.agree()
        raise AssertionError("all ranks raise the error")


class Calls:
    """The calls of all plans on the ranks of a grid, one at a time.

    Grids of the same communicator share it: then no two of their plans have the same number.

    Parameters
    ----------
    comm : Intracomm
    watch : Watch
    failures : NoFailures

    Attributes
    ----------
    comm, watch
        As above.
    plans : int
        Number of plans made so far.
    """

    def __init__(self, comm: MPI.Intracomm, watch: Watch, failures: NoFailures) -> None:
        self.comm, self.watch, self._failures = comm, watch, failures
        self.plans, self._lock = 0, threading.Lock()

    @contextmanager
    def call(self, action: str, plan: Caller, settle: Callable[[], None]) -> Iterator[PlanCall]:
        """Make a call; see `a2d_mpi.comm.grid.ProcessGrid.call`."""
        if self.comm == MPI.COMM_NULL:
            raise CollectiveError("the grid was freed")
        alone = self._lock.acquire(blocking=False)
        if not alone:
            self._lock.acquire()
        try:
            with self._failures.translated(settle):
                call = PlanCall(self, action, plan, alone)
                yield call
                call.end()
        finally:
            self._lock.release()


_serials = count(1)
PLANS: WeakValueDictionary[int, Caller] = WeakValueDictionary()  # all plans of this process


class PlanCall(Call):
    """A collective call of a plan; see `a2d_mpi.comm.grid.ProcessGrid.call`.

    Attributes
    ----------
    watch : Watch
        Reports of ranks that wait for a long time.
    text : str
        The call in messages.
    stamp : (int, int, int)
        Number of the action, of the plan and of its call, the same on all ranks.
    """

    def __init__(self, calls: Calls, action: str, plan: Caller, alone: bool) -> None:
        super().__init__(calls.comm)
        # Two threads that take turns are an error: their order may differ between ranks.
        if plan._interrupted or not alone:
            self.problem = INTERRUPTED if alone else TWO_THREADS
        self._of_grid, self._plan, self.watch = calls, plan, calls.watch
        if action == "making":  # a new plan, or a copy that gets another mask
            plan.serial, plan._number, plan._calls = next(_serials), 0, -1
            PLANS[plan.serial] = plan
        number, call = plan._number or calls.plans + 1, plan._calls + 1
        self.stamp = ACTIONS.index(action), number, call
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
            If ranks make different calls, a rank has a problem, or values or flags differ.  If
            calls differ, the message has the call of each rank.
        """
        self.watch.doing = self.text  # not the call, which would keep the plan alive
        own = [*self.stamp, _digest(same), self.problem is not None, *flags]
        with self.watch.waiting("to begin"):
            said, differ = _reduced(self.comm, own)
        self.watch.calls += 1
        if any(differ[_STAMP]):
            calls = by_text(enumerate(self.comm.allgather(self.text)))
            listed = "; ".join(f"{text} on {ranks}" for text, ranks in calls.items())
            raise CollectiveError(f"ranks disagree on the call: {listed}")
        if differ[_DIGEST] or said[_PROBLEM]:
            with self.watch.waiting("to agree"):
                super().agree(same)
        if others := [text for text, differs in zip(_SAME, differ[_FLAGS]) if differs]:
            raise CollectiveError(f"ranks disagree on {others[0]}")
        _, self._plan._number, self._plan._calls = self.stamp
        self._plan._interrupted = True  # an exception from here on leaves messages under way
        self._of_grid.plans = max(self._of_grid.plans, self._plan._number)
        return Flags(*map(bool, said[_FLAGS]))

    def end(self) -> None:
        """End the call: no message is under way."""
        self._plan._interrupted = False


# Places in the buffer that ranks reduce to begin a call.
_STAMP, _DIGEST, _PROBLEM, _FLAGS = slice(3), 3, 4, slice(5, None)


def _reduced(comm: MPI.Intracomm, own: list[int]) -> tuple[list[int], list[int]]:
    """Return the bits of each number that are set on any rank, and the bits in which ranks differ.

    It reduces a buffer, not an object.  mpi4py would reduce objects up a tree and send the result
    down again, and the ranks would begin the call one after the other.
    """
    # A bit in which ranks differ is set in the number on one rank, in its complement on another.
    both = array("q", [*own, *(-1 - x for x in own)])
    comm.Allreduce(MPI.IN_PLACE, both, MPI.BOR)
    said = both[: len(own)].tolist()
    return said, [x & y for x, y in zip(said, both[len(own) :])]


def _digest(same: Mapping[str, object]) -> int:
    """Return a number of 56 bits that says whether values have the same texts."""
    texts = "\n".join(f"{name} {x}" for name, x in same.items())
    return int.from_bytes(blake2b(texts.encode(), digest_size=7).digest(), "big")
