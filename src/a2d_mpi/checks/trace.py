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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from a2d_mpi.core.atomic import check_writable, write_whole
from a2d_mpi.planning.cost import nbytes, pairs_of
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Attend, Differentiate, Message, Send, Wait
from a2d_mpi.schedules.writing import write

if TYPE_CHECKING:
    from mpi4py import MPI

    from a2d_mpi.attention.plan import AttentionPlan
    from a2d_mpi.devices.clocks import Recorded

COMPUTE, COMMUNICATION = THREADS = "compute", "communication"
Event = dict[str, object]


class Trace:
    """A recorder of plan calls on all ranks, one section after the other.

    Parameters
    ----------
    comm : Intracomm
    path : Path
        Path of the file.

    Attributes
    ----------
    events : list of dict
        On rank 0, the events of all ranks in the Trace Event Format, with at least "ph", "ts",
        "pid", "tid", "name", "args".  Times are in microseconds, rounded to nanoseconds.
    """

    def __init__(self, comm: MPI.Intracomm, path: Path) -> None:
        self._comm, self._path, self._end = comm, path, 0.0
        self.events: list[Event] = [] if comm.rank else [*_names(comm.size)]

    @contextmanager
    def calls(self, plan: AttentionPlan, name: str) -> Iterator[None]:
        """Record the calls of a plan in a ``with`` statement as one section.  Collective.

        A section begins when the section before it has ended on all ranks.

        Parameters
        ----------
        plan : AttentionPlan
            A plan on all ranks of the trace.
        name : str
            Name of the plan in the trace.
        """
        self._comm.Barrier()
        zero = time.perf_counter() - self._end
        with plan.recording() as calls:
            yield
        events = _events(plan, calls, zero, name, self._end)
        ends = ((x["ts"] + x.get("dur", 0)) / 1e6 for x in events)
        self._end = self._comm.allreduce(max(ends, default=self._end), max)
        self.events += chain.from_iterable(self._comm.gather(events) or [])

    def write(self, origin: Mapping[str, object]) -> None:
        """Write the file, with the provenance of the job in it.  Local, for rank 0.

        Raises
        ------
        OSError
            If the file cannot be written; an existing file is left as it was.
        """
        numbers: dict[object, int] = {}  # viewers know arrows by numbers
        for x in self.events:
            if "id" in x:
                x["id"] = numbers.setdefault(x["id"], len(numbers))
        end = f'"displayTimeUnit": "ms",\n"otherData": {json.dumps(origin)}'
        lines = ",\n".join(map(json.dumps, self.events))
        text = f'{{"traceEvents": [\n{lines}\n],\n{end}}}\n'
        write_whole(self._path, text.encode())


def _events(
    plan: AttentionPlan, calls: Sequence[Recorded], zero: float, name: str, section: float
) -> list[Event]:
    """Return the events of this rank in a section, with times from `zero` on."""
    rank, place = plan.grid.comm.rank, plan.layout.world_ranks().tolist()
    events: list[Event] = []

    def add(
        thread: str, label: str, category: str, begin: float, end: float, args: dict,
        arrows: Sequence[Event] = (),
    ) -> None:  # fmt: skip
        """Add an activity of this rank, and the ends of arrows in it."""
        where = {"pid": place[rank], "tid": _tid(place[rank], thread)}
        start, stop = (round(1e9 * (x - zero)) for x in (begin, end))
        times = {"ts": start / 1000, "dur": (stop - start) / 1000}
        event = {"ph": "X", "name": label, "cat": category}
        events.append({**event, **times, **where, "args": args})
        for arrow in arrows:
            # Just before the end of a wait: viewers look for the activity around it.
            now = start if arrow["ph"] == "s" else max(start, stop - 1)
            events.append({**arrow, "ts": now / 1000, **where})

    for number, call in enumerate(calls):
        programs = write(plan.method, call.phase, plan.layout, plan.problem, rank, plan.overlap)
        labels: dict[int, tuple[str, dict]] = {len(call.spans) - 1: (f"{name} {call.phase}", {})}
        for program, times in zip(programs, call.programs):
            of, posted = (section, number, program.slice, program.stage), {}
            for step, (begin, first), (end, last) in zip(program.steps, times, times[1:]):
                args = _block(program, step) if isinstance(step, Attend | Differentiate) else {}
                for span in range(first, last):  # one, or none
                    labels[span] = type(step).__name__.lower(), args
                if isinstance(step, Message):
                    x = posted[step.index] = _arrow(program, step, place, call.phase, of)
                    sent = x["ph"] == "s"
                    label = f"{'send' if sent else 'receive'} {x['name']}"
                    add(COMMUNICATION, label, "post", begin, end, x["args"], [x] * sent)
                elif isinstance(step, Wait):
                    found = [posted[x] for x in step.messages]
                    moved = sum(x["args"]["bytes"] for x in found)
                    args = {"messages": len(found), "bytes": moved}
                    received = [x for x in found if x["ph"] == "f"]
                    add(COMMUNICATION, "wait", "wait", begin, end, args, received)
        for i, (part, begin, end) in enumerate(call.spans):
            label, args = labels.get(i, (part, {}))
            add(COMPUTE, label, part, begin, end, args)
    # Viewers nest an activity in those before it.
    return sorted(events, key=lambda x: (x["ts"], -x.get("dur", 0)))


def _arrow(program: Program, step: Message, place: list[int], phase: str, of: tuple) -> Event:
    """Make the end of an arrow, without its time: a message that this rank sends or receives.

    The id is equal on both ranks, and different for every message.
    """
    source, to = (place[program.ranks[x]] for x in (program.rank, step.peer))
    sent, kind = isinstance(step, Send), program.arrays[step.rows.array].kind
    if not sent:
        source, to = to, source
    args = {"bytes": nbytes(program, step.rows), "from": source, "to": to}
    args |= {"phase": phase, "channel": step.channel}
    event = {"ph": "s"} if sent else {"ph": "f", "bp": "e"}
    event["id"] = *of, source, to, kind, step.tag, step.turn
    return {**event, "name": kind, "cat": "message", "args": args}


def _block(program: Program, call: Attend | Differentiate) -> dict[str, object]:
    """Return the block of a kernel call, with its visible pairs per head."""
    pairs = int(pairs_of(program, [call])[0][0])
    return {"rows": call.queries.count, "columns": call.keys.count, "pairs": pairs}


def _names(ranks: int) -> Iterator[Event]:
    """Yield the events that name all ranks and their threads, and order them."""
    threads = [("thread", x, x) for x in THREADS]
    for rank in range(ranks):
        for what, thread, name in [("process", THREADS[0], f"rank {rank}"), *threads]:
            where = {"ph": "M", "ts": 0, "pid": rank, "tid": _tid(rank, thread)}
            yield {**where, "name": f"{what}_name", "args": {"name": name}}
            order = {"sort_index": where["tid"]}
            yield {**where, "name": f"{what}_sort_index", "args": order}


def _tid(rank: int, thread: str) -> int:
    """Return the number of a thread, unique over all ranks and not 0, as viewers require."""
    return 1 + len(THREADS) * rank + THREADS.index(thread)


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

    def read(path: Path) -> None:
        if "traceEvents" not in json.loads(path.read_text()):
            raise ValueError("it has no traceEvents")

    check_writable(path, 0, read)
