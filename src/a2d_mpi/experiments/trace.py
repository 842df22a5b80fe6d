"""Timelines of all ranks in one file for Perfetto and Chrome, from measured or predicted times.

The file is JSON in the Trace Event Format.

A rank is a process of the file.  Its thread "compute" has calls of the plan, kernel calls with
their blocks, and merges; its thread "communication" has what the rank posts and waits for.  A
message is an arrow, from the slice in which it is posted to the end of the wait that completes it.

Measured times are those of each rank's own clock, `time.perf_counter`, since the end of a barrier
of all ranks before the calls.  The error that remains is the difference between the ends of the
barrier on two ranks: a few microseconds inside a node, some latencies of the network between
nodes, and more where ranks share a core.  So an arrow may seem to end before it begins, by no more
than that.  Clocks drift apart by parts per million: by microseconds in a second.  On one node all
ranks read the same clock, and an error of the barrier shows as an offset between ranks.  On a GPU
the thread "compute" has the times of the device, which begin with the call on the host: work that
was queued before the call makes them late.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from a2d_mpi.core.atomic import check_writable, replacing
from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules import problem_of, write
from a2d_mpi.schedules.accounts import nbytes, pairs_of
from a2d_mpi.schedules.problem import Workload
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import (
    KINDS,
    Attend,
    Barrier,
    Differentiate,
    Message,
    Rows,
    Send,
    Wait,
)

if TYPE_CHECKING:  # predicted traces need no MPI, and measured ones no simulator
    from mpi4py import MPI

    from a2d_mpi.attention.engine import Recorded
    from a2d_mpi.attention.plan import AttentionPlan
    from a2d_mpi.planning.machine import Machine
    from a2d_mpi.planning.survey import Survey

COMPUTE, COMMUNICATION = THREADS = "compute", "communication"
_BEGIN = '{"traceEvents": ['  # of every file
_RUNS = 4  # of tokens that are written out for a block


class Arrow(NamedTuple):
    """One end of an arrow: a message that a rank sends or receives.

    Attributes
    ----------
    key : hashable
        The same on both ranks, and another one for every message of the section.
    kind : str
        Of the rows.
    sent : bool
        Or received.
    args : dict
        "bytes", "from", "to", and of a measured message "phase" and "channel".
    """

    key: object
    kind: str
    sent: bool
    args: dict[str, object]


class Slice(NamedTuple):
    """Something that a rank does from `begin` to `end`, in seconds since the section began.

    Messages that are sent start at `begin`, messages that are received arrive at `end`.
    """

    thread: str
    name: str
    category: str
    begin: float
    end: float
    args: dict[str, object]
    arrows: Sequence[Arrow] = ()


Section = Sequence[list[Slice]]  # what all ranks do in one stretch of time, by world rank


class Trace:
    """Records calls of plans on all ranks, one section after the other; rank 0 keeps them.

    Parameters
    ----------
    comm : Intracomm
    path : Path
        Of the file.
    """

    def __init__(self, comm: MPI.Intracomm, path: Path) -> None:
        self._comm, self._path, self.sections = comm, path, []

    @contextmanager
    def calls(self, plan: AttentionPlan, name: str) -> Iterator[None]:
        """Record the calls of a plan until the block ends, as one section.  Collective.

        Parameters
        ----------
        plan : AttentionPlan
            On all ranks of the trace.
        name : str
            Of the plan, in the trace.
        """
        self._comm.Barrier()
        zero = time.perf_counter()
        with plan.recording() as calls:
            yield
        found = self._comm.gather(measured(plan, calls, zero, name))
        if found is not None:
            self.sections.append(found)

    def write(self) -> None:
        """Write the file; on rank 0 only, local."""
        write_trace(self._path, self.sections, "measured")


def measured(
    plan: AttentionPlan, calls: Sequence[Recorded], zero: float, name: str
) -> list[Slice]:
    """What this rank did.

    Parameters
    ----------
    plan : AttentionPlan
    calls : sequence of Recorded
    zero : float
        When the section began, by `time.perf_counter`.
    name : str
        Of the plan.
    """
    rank, place, found = plan.grid.comm.rank, plan.layout.world_ranks().tolist(), []
    for number, call in enumerate(calls):
        programs = write(plan.method, call.phase, plan.layout, plan.problem, rank, plan.overlap)
        labels: dict[int, tuple[str, dict]] = {len(call.spans) - 1: (f"{name} {call.phase}", {})}
        for i, (program, times) in enumerate(zip(programs, call.programs)):
            blocks, posted = _blocks(program), {}
            for step, (begin, first), (end, last) in zip(program.steps, times, times[1:]):
                args = next(blocks) if isinstance(step, Attend | Differentiate) else {}
                for span in range(first, last):  # one, or none
                    labels[span] = type(step).__name__.lower(), args
                if isinstance(step, Message):
                    x = _arrow(program, step, place, call.phase)
                    x = posted[step.index] = x._replace(key=(number, i, *x.key))
                    found.append(
                        _post(f"{'send' if x.sent else 'receive'} {x.kind}", [x], begin, end)
                    )
                elif isinstance(step, Barrier):
                    found.append(_post("barrier", [], begin, end))
                elif isinstance(step, Wait):
                    messages = [posted[x] for x in step.messages if x in posted]
                    found.append(_wait(messages, len(step.messages), begin, end))
        for i, (part, begin, end) in enumerate(call.spans):
            label, args = labels.get(i, (part, {}))
            found.append(Slice(COMPUTE, label, part, begin, end, args))
    return [x._replace(begin=x.begin - zero, end=x.end - zero) for x in found]


def _arrow(program: Program, step: Message, place: list[int], phase: str) -> Arrow:
    """The message of a step."""
    source, to = (place[program.grid_rank(x)] for x in (program.rank, step.peer))
    sent, kind = isinstance(step, Send), program.arrays[step.rows.array].kind
    if not sent:
        source, to = to, source
    args = {"bytes": nbytes(program, step.rows), "from": source, "to": to}
    args |= {"phase": phase, "channel": step.channel}
    return Arrow((source, to, kind, step.tag, step.turn), kind, sent, args)


def _post(name: str, messages: list[Arrow], begin: float, end: float) -> Slice:
    """Messages are posted, or a barrier is entered."""
    args, sent = messages[0].args if len(messages) == 1 else {}, [x for x in messages if x.sent]
    return Slice(COMMUNICATION, name, "post", begin, end, args, sent)


def _wait(messages: list[Arrow], number: int, begin: float, end: float) -> Slice:
    """A wait for messages and, if the number of all is larger, for a barrier."""
    args: dict[str, object] = {"bytes": sum(x.args["bytes"] for x in messages)}
    for i, x in enumerate(messages):
        peer = f"to {x.args['to']}" if x.sent else f"from {x.args['from']}"
        args[f"message {i}"] = f"{x.kind} {peer}, {x.args['bytes']} bytes"
    if number > len(messages):
        args["barrier"] = "yes"
    received = [x for x in messages if not x.sent]
    return Slice(COMMUNICATION, "wait", "wait", begin, end, args, received)


def _blocks(program: Program) -> Iterator[dict[str, object]]:
    """The block of every kernel call of a program: tokens, and visible pairs of one head."""
    calls = [x for x in program.steps if isinstance(x, Attend | Differentiate)]
    pairs = pairs_of(program, calls)[0].tolist() if calls else []
    for call, count in zip(calls, pairs):
        sizes = {"rows": call.queries.count, "columns": call.keys.count, "pairs": count}
        tokens = {x: _tokens(program, getattr(call, x)) for x in ("queries", "keys")}
        yield sizes | tokens


def _tokens(program: Program, rows: Rows) -> str:
    """Tokens as Python's slices, of which some are left out if there are many."""
    runs = [x for x in program.token_runs(rows) if len(x)]
    texts = [f"{x.start}:{x.stop}" + f":{x.step}" * (x.step != 1) for x in runs[:_RUNS]]
    return ", ".join(texts + ["..."] * (len(runs) > _RUNS))


def predicted(
    machine: Machine, method: str, layout: Layout, work: Workload, name: str
) -> list[Section]:
    """What all ranks do by the simulator, a section for each phase.

    Parameters
    ----------
    machine : Machine
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    layout : Layout
    work : Workload
    name : str
        Of the plan.

    Raises
    ------
    ValueError
        As `a2d_mpi.planning.model.predict` does.
    """
    from a2d_mpi.planning.model import simulated
    from a2d_mpi.planning.survey import survey_of

    problem, sections = problem_of(method, layout, work, work.mask), []
    place = layout.world_ranks().tolist()
    for phase in work.phases:
        survey = survey_of(machine, method, layout, work, problem, phase)
        spans = [[] for _ in range(layout.size)]
        simulated(machine, layout, survey, spans)
        section: list[list[Slice]] = [[] for _ in range(layout.size)]
        for rank, found in enumerate(section[x] for x in place):
            programs = write(method, phase, layout, problem, rank, work.overlap)
            blocks = [x for program in programs for x in _blocks(program)]
            # Before the kernel calls of a backward pass there is delta, which is no step.
            computes = sum(part == "compute" for part, *_ in spans[rank])
            labels = iter([{}] * (computes - len(blocks)) + blocks)
            call = "attend" if phase == "forward" else "differentiate"
            last = spans[rank][-1][2]
            found.append(Slice(COMPUTE, f"{name} {phase}", "total", 0.0, last, {}))
            for part, begin, end, numbers in spans[rank]:
                # None of the messages of barriers.
                messages = [x for x in numbers if survey.kinds[x] < len(KINDS)]
                arrows = [_simulated(survey, x, rank, place) for x in messages]
                if part == "wait":
                    found.append(_wait(arrows, len(numbers), begin, end))
                elif numbers:
                    found.append(_post("post", arrows, begin, end))
                else:
                    args = next(labels) if part == "compute" else {}
                    found.append(Slice(COMPUTE, call if args else part, part, begin, end, args))
        sections.append(section)
    return sections


def _simulated(survey: Survey, number: int, rank: int, place: list[int]) -> Arrow:
    """A message of the simulator."""
    source, to, nbytes = (int(x[number]) for x in survey.messages)
    args = {"bytes": nbytes, "from": place[source], "to": place[to]}
    return Arrow(number, list(KINDS)[survey.kinds[number]], source == rank, args)


def write_trace(path: Path, sections: Sequence[Section], times: str) -> None:
    """Write sections one after the other, whole or not at all.

    Parameters
    ----------
    path : Path
    sections : sequence of Section
    times : {"measured", "predicted"}

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    lines = ",\n".join(json.dumps(x) for x in events_of(sections))
    others = json.dumps({"displayTimeUnit": "ms", "otherData": {"times": times}})
    with replacing(path) as (target, temporary):
        with open(temporary, "w") as file:
            file.write(f"{_BEGIN}\n{lines}\n],\n{others[1:]}\n")
        os.replace(temporary, target)


def events_of(sections: Sequence[Section]) -> list[dict[str, object]]:
    """The events of a file; times become microseconds, to a nanosecond.

    Parameters
    ----------
    sections : sequence of Section
        Each begins when the one before it has ended on all ranks.

    Returns
    -------
    list of dict
        Of the Trace Event Format: "ph", "ts", "pid", "tid", "name" and "args" at least.
    """
    events, start, numbers = [], 0, {}
    for rank in range(len(sections[0]) if sections else 0):
        events += _names(rank)
    for i, section in enumerate(sections):
        last = start
        for rank, found in enumerate(section):
            # What a slice is nested in comes first.
            for x in sorted(found, key=lambda x: (x.begin, -x.end)):
                begin, end = start + round(1e9 * x.begin), start + round(1e9 * x.end)
                last, where = max(last, end), {"pid": rank, "tid": _tid(rank, x.thread)}
                times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
                event = {"ph": "X", "name": x.name, "cat": x.category}
                events.append({**event, **times, **where, "args": x.args})
                for arrow in x.arrows:
                    # Just before the end of a wait: viewers look for the slice around it.
                    now = begin if arrow.sent else max(begin, end - 1)
                    event = {"ph": "s"} if arrow.sent else {"ph": "f", "bp": "e"}
                    event["id"] = numbers.setdefault((i, arrow.key), len(numbers))
                    event |= {"name": arrow.kind, "cat": "message", "ts": now / 1000}
                    events.append({**event, **where, "args": arrow.args})
        start = last
    return events


def _names(rank: int) -> Iterator[dict[str, object]]:
    """Names of a rank and of its threads."""
    named = [("process", THREADS[0], f"rank {rank}"), *(("thread", x, x) for x in THREADS)]
    for what, thread, name in named:
        where = {"ts": 0, "pid": rank, "tid": _tid(rank, thread)}
        yield {"ph": "M", "name": f"{what}_name", **where, "args": {"name": name}}
        order = {"sort_index": where["tid"]}
        yield {"ph": "M", "name": f"{what}_sort_index", **where, "args": order}


def _tid(rank: int, thread: str) -> int:
    """Number of a thread: of all ranks another one, as viewers know threads by it; not 0."""
    return 1 + len(THREADS) * rank + THREADS.index(thread)


def read_trace(path: Path) -> list[dict[str, object]]:
    """The events of a file that this module has written.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is another kind of file.
    """
    try:
        _check_begin(path)
        return json.loads(path.read_text())["traceEvents"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is no file of --trace: {error}") from error


def check_trace(path: Path | None) -> None:
    """Check before the work that a trace can be written, if one is asked for.

    Raises
    ------
    ValueError
        If its name does not end with .json, or another kind of file has the name.
    OSError
        If the file cannot be written.
    """
    if path is None:
        return
    if path.suffix != ".json":
        raise ValueError(f"--trace {path} must end with .json")
    check_writable(path, 0, _check_begin)


def _check_begin(path: Path) -> None:
    with open(path, "rb") as file:
        begin = file.read(len(_BEGIN))
    if begin != _BEGIN.encode():
        raise ValueError(f"it begins with {begin!r}")
