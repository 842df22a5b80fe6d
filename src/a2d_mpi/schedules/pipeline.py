"""Slices of the heads: the program of a few heads, run several times as a pipeline.

Heads are independent.  A rank that cuts its heads into slices runs the same programs for each
slice.  The messages of the next slice travel while this slice is computed, and so do the results
of the slice before.  So transfers in both directions overlap with computing, whatever the method.
Three slices are alive at a time, and their buffers are used in turn (`turns`).

The programs of a slice are: take its heads (with a head axis, exchange tokens for heads), attend,
put its heads.  Each one has three parts, see `borders`.  A part runs in a stage:

    stages of a grid        take, open | compute | close, put
    stages of a head axis   open | close, compute, open | close
    stages of both          open | close, open | compute | close, open | close

While a stage of one slice runs, the next stage of the slice before it runs, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from a2d_mpi.core.layout import Layout
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.slices import ALIVE, ATTEND, PUT, TAKE
from a2d_mpi.schedules.steps import PARTIALS, KernelCall, Message, Step, Wait

OPEN, COMPUTE, CLOSE = range(3)  # parts of a program


def turns(number: int, layout: Layout) -> int:
    """Return how many slices have buffers of their own for a program of this number.

    With a grid and a head axis, attention still sends the heads that a slice took when the slice
    three places later begins to take its heads.
    """
    return ALIVE + (number == TAKE and layout.positions > 1 and layout.heads > 1)


def order(layout: Layout, slices: int, overlap: bool) -> Iterator[tuple[int, int, int]]:
    """Yield slice, program and part of everything that a rank runs, in this order."""
    grid, heads = layout.positions > 1, layout.heads > 1
    stages: list[list[tuple[int, int]]] = [[]]
    for program in (TAKE, ATTEND, PUT):
        for part in (OPEN, COMPUTE, CLOSE):
            # A part that needs messages of the part before it is another stage.
            waits = (part != OPEN and grid) if program == ATTEND else (part == CLOSE and heads)
            if waits and overlap:
                stages.append([])
            stages[-1].append((program, part))
    for tick in range(slices + len(stages) - 1):
        for i, stage in enumerate(stages):
            if 0 <= tick - i < slices:
                yield from ((tick - i, program, part) for program, part in stage)


def borders(p: Program) -> tuple[int, int]:
    """Return the numbers of steps at which the second and the third part of a program begin.

    The first part posts messages.  The second one begins with the first wait or kernel call.  The
    third one begins with the first wait after which no rank gets anything that it needs for kernel
    calls: so ranks never wait in the second part for the third part of another rank, and pipelines
    cannot block each other.
    """
    steps = p.steps
    begin = next((i for i, x in enumerate(steps) if isinstance(x, Wait | KernelCall)), len(steps))
    last = max((i for i, x in enumerate(steps) if _for_kernels(p, x)), default=-1)
    waits = (i for i, x in enumerate(steps) if i > last and isinstance(x, Wait))
    return begin, next(waits, len(steps))


def _for_kernels(p: Program, step: Step) -> bool:
    """Return True for a kernel call, and for a message that others may need for kernel calls.

    In a ring this is any message, otherwise only rows that are no partial results.
    """
    if isinstance(step, Message):
        return p.group.ring or p.arrays[step.rows.array].kind not in PARTIALS
    return isinstance(step, KernelCall)


def pipelined(
    programs: Sequence[Program], slices: int, layout: Layout, overlap: bool
) -> list[Program]:
    """Repeat programs for all slices: return the parts of programs in the order of execution.

    Buffers of a slice have names that other slices do not use meanwhile.

    Parameters
    ----------
    programs : sequence of Program
        The programs of a slice, in order.
    slices : int
    layout : Layout
    overlap : bool
        Whether messages of one slice travel while others compute.
    """
    parts: dict[tuple[int, int, int], Program] = {}
    for i, p in product(range(slices), programs):
        a, b = borders(p)
        new = p.with_steps()
        new.slice = i
        for name, array in p.arrays.items():
            memory = f"{p.stage}.{i % turns(p.stage, layout)} {array.memory}"
            new.arrays[name] = replace(array, memory=memory)
        for part, steps in enumerate((p.steps[:a], p.steps[a:b], p.steps[b:])):
            parts[i, p.stage, part] = new.with_steps(steps)
    return [parts[x] for x in order(layout, slices, overlap)]
