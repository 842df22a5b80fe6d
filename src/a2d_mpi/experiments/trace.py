"""Timelines of all ranks in one file for Perfetto and Chrome.

The file is JSON in the Trace Event Format.

Each rank is a process of the file.  Its thread "compute" shows calls of the plan, kernel calls
with their blocks, and merges.  Its thread "communication" shows posts and waits.  A message is an
arrow, from the slice in which it is posted to the end of the wait that completes it.

Times come from each rank's own clock, `time.perf_counter`.  They begin at the end of a
barrier of all ranks before the calls.  The barrier ends at slightly different times on two ranks,
which is the error of the times.  It is a few microseconds inside a node and some latencies of the
network between nodes.  It is larger if ranks share a core.  So an arrow may seem to end before it
begins.  Clocks also drift apart by some microseconds per second.  On one node all ranks read the
same clock, and the error of the barrier is an offset between ranks.  On a GPU the thread "compute"
shows times of the device.  They are counted from the call on the host, so work that was queued
before the call makes them late.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from a2d_mpi.core.atomic import check_writable, write_whole
from a2d_mpi.planning.accounts import nbytes, pairs_of
from a2d_mpi.schedules import write
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Attend, Differentiate, Message, Send, Wait

if TYPE_CHECKING:  # figures of traces need no MPI
    from mpi4py import MPI

    from a2d_mpi.attention.plan import AttentionPlan
    from a2d_mpi.devices.clocks import Recorded

COMPUTE, COMMUNICATION = THREADS = "compute", "communication"
_BEGIN = '{"traceEvents": ['  # first characters of every file


class Arrow(NamedTuple):
    """One end of an arrow: a message that a rank sends or receives.

    Attributes
    ----------
    key : hashable
        Equal on both ranks, and different for every message of the section.
    kind : str
        Kind of the rows.
    sent : bool
        True: sent; False: received.
    args : dict
        "bytes", "from", "to", "phase" and "channel".
    """

    key: object
    kind: str
    sent: bool
    args: dict[str, object]


class Slice(NamedTuple):
    """An activity of a rank from `begin` to `end`, in seconds since the section began.

    Messages that are sent start at `begin`, messages that are received arrive at `end`.
    """

    thread: str
    name: str
    category: str
    begin: float
    end: float
    args: dict[str, object]
    arrows: Sequence[Arrow] = ()


Section = Sequence[list[Slice]]  # slices of all ranks, by world rank


class Trace:
    """A recorder of plan calls on all ranks, one section after the other; rank 0 keeps them.

    Parameters
    ----------
    comm : Intracomm
    path : Path
        Path of the file.

    Attributes
    ----------
    sections : list of Section
        On rank 0; empty on other ranks.
    """

    def __init__(self, comm: MPI.Intracomm, path: Path) -> None:
        self._comm, self._path, self.sections = comm, path, []

    @contextmanager
    def calls(self, plan: AttentionPlan, name: str) -> Iterator[None]:
        """Record the calls of a plan in a ``with`` statement as one section.  Collective.

        Parameters
        ----------
        plan : AttentionPlan
            A plan on all ranks of the trace.
        name : str
            Name of the plan in the trace.
        """
        self._comm.Barrier()
        zero = time.perf_counter()
        with plan.recording() as calls:
            yield
        section = self._comm.gather(measured(plan, calls, zero, name))
        if section is not None:
            self.sections.append(section)

    def write(self) -> None:
        """Write the file.  Local, for rank 0.

        Raises
        ------
        OSError
            If the file cannot be written; an existing file is left as it was.
        """
        lines = ",\n".join(json.dumps(x) for x in events_of(self.sections))
        text = f'{_BEGIN}\n{lines}\n],\n"displayTimeUnit": "ms"}}\n'
        write_whole(self._path, text.encode())


def measured(
    plan: AttentionPlan, calls: Sequence[Recorded], zero: float, name: str
) -> list[Slice]:
    """Make the slices of this rank from recorded calls.

    Parameters
    ----------
    plan : AttentionPlan
    calls : sequence of Recorded
    zero : float
        Begin of the section, by `time.perf_counter`.
    name : str
        Name of the plan.
    """
    rank, place, slices = plan.grid.comm.rank, plan.layout.world_ranks().tolist(), []
    for number, call in enumerate(calls):
        programs = write(plan.method, call.phase, plan.layout, plan.problem, rank, plan.overlap)
        labels: dict[int, tuple[str, dict]] = {len(call.spans) - 1: (f"{name} {call.phase}", {})}
        posted: dict[tuple[int, int, int], Arrow] = {}  # by slice, program and message
        for program, times in zip(programs, call.programs):
            blocks, of = _blocks(program), (program.slice, program.number)
            for step, (begin, first), (end, last) in zip(program.steps, times, times[1:]):
                args = next(blocks) if isinstance(step, Attend | Differentiate) else {}
                for span in range(first, last):  # one, or none
                    labels[span] = type(step).__name__.lower(), args
                if isinstance(step, Message):
                    x = _arrow(program, step, place, call.phase)
                    x = posted[(*of, step.index)] = x._replace(key=(number, *of, *x.key))
                    label, arrows = ("send", [x]) if x.sent else ("receive", [])
                    post = COMMUNICATION, f"{label} {x.kind}", "post", begin, end
                    slices.append(Slice(*post, x.args, arrows))
                elif isinstance(step, Wait):
                    messages = [posted[(*of, x)] for x in step.messages]
                    slices.append(_wait(messages, begin, end))
        for i, (part, begin, end) in enumerate(call.spans):
            label, args = labels.get(i, (part, {}))
            slices.append(Slice(COMPUTE, label, part, begin, end, args))
    return [x._replace(begin=x.begin - zero, end=x.end - zero) for x in slices]


def _arrow(program: Program, step: Message, place: list[int], phase: str) -> Arrow:
    """Make the arrow of a step that posts a message."""
    source, to = (place[program.ranks[x]] for x in (program.rank, step.peer))
    sent, kind = isinstance(step, Send), program.arrays[step.rows.array].kind
    if not sent:
        source, to = to, source
    args = {"bytes": nbytes(program, step.rows), "from": source, "to": to}
    args |= {"phase": phase, "channel": step.channel}
    return Arrow((source, to, kind, step.tag, step.turn), kind, sent, args)


def _wait(messages: list[Arrow], begin: float, end: float) -> Slice:
    """Make the slice of a wait for messages."""
    args = {"messages": len(messages), "bytes": sum(x.args["bytes"] for x in messages)}
    received = [x for x in messages if not x.sent]
    return Slice(COMMUNICATION, "wait", "wait", begin, end, args, received)


def _blocks(program: Program) -> Iterator[dict[str, object]]:
    """Yield the block of every kernel call of a program, with its visible pairs per head."""
    calls = [x for x in program.steps if isinstance(x, Attend | Differentiate)]
    pairs = pairs_of(program, calls)[0].tolist() if calls else []
    for call, count in zip(calls, pairs):
        yield {"rows": call.queries.count, "columns": call.keys.count, "pairs": count}


def events_of(sections: Sequence[Section]) -> list[dict[str, object]]:
    """Convert sections to events; times become microseconds, rounded to nanoseconds.

    Parameters
    ----------
    sections : sequence of Section
        Each section begins when the section before it has ended on all ranks.

    Returns
    -------
    list of dict
        Events of the Trace Event Format, with at least "ph", "ts", "pid", "tid", "name", "args".
    """
    events, start, numbers = [], 0, {}
    for rank in range(len(sections[0]) if sections else 0):
        events += _names(rank)
    for i, section in enumerate(sections):
        last = start
        for rank, slices in enumerate(section):
            # Viewers nest a slice in the slices before it.
            for piece in sorted(slices, key=lambda piece: (piece.begin, -piece.end)):
                begin, end = start + round(1e9 * piece.begin), start + round(1e9 * piece.end)
                last, where = max(last, end), {"pid": rank, "tid": _tid(rank, piece.thread)}
                times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
                event = {"ph": "X", "name": piece.name, "cat": piece.category}
                events.append({**event, **times, **where, "args": piece.args})
                for arrow in piece.arrows:
                    # Just before the end of a wait: viewers look for the slice around it.
                    now = begin if arrow.sent else max(begin, end - 1)
                    event = {"ph": "s"} if arrow.sent else {"ph": "f", "bp": "e"}
                    event["id"] = numbers.setdefault((i, arrow.key), len(numbers))
                    event |= {"name": arrow.kind, "cat": "message", "ts": now / 1000}
                    events.append({**event, **where, "args": arrow.args})
        start = last
    return events


def _names(rank: int) -> Iterator[dict[str, object]]:
    """Yield the events that name a rank and its threads, and order them."""
    named = [("process", THREADS[0], f"rank {rank}"), *(("thread", x, x) for x in THREADS)]
    for what, thread, name in named:
        where = {"ts": 0, "pid": rank, "tid": _tid(rank, thread)}
        yield {"ph": "M", "name": f"{what}_name", **where, "args": {"name": name}}
        order = {"sort_index": where["tid"]}
        yield {"ph": "M", "name": f"{what}_sort_index", **where, "args": order}


def _tid(rank: int, thread: str) -> int:
    """Return the number of a thread, unique over all ranks and not 0, as viewers require."""
    return 1 + len(THREADS) * rank + THREADS.index(thread)


def read_trace(path: Path) -> list[dict[str, object]]:
    """Read the events of a file that this module wrote.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is another kind of file.
    """
    try:
        _check_begin(path)
        return json.loads(path.read_text())["traceEvents"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a file of --trace: {error}") from error


def check_trace(path: Path) -> None:
    """Check before the work that a trace can be written.

    Raises
    ------
    ValueError
        If its name does not end with .json, or another kind of file has the name.
    OSError
        If the file cannot be written.
    """
    if path.suffix != ".json":
        raise ValueError(f"--trace {path} must end with .json")
    check_writable(path, 0, _check_begin)


def _check_begin(path: Path) -> None:
    with open(path, "rb") as file:
        begin = file.read(len(_BEGIN))
    if begin != _BEGIN.encode():
        raise ValueError(f"it begins with {begin!r}")
