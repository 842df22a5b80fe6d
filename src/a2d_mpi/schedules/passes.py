"""Passes: functions from program to program, which add what the steps of a method cost.

A method says what happens.  Each pass here rewrites the steps for one reason, and no pass knows a
method.  `lowered` applies all of them; the executor runs the result.

In a plain run, Attention2D on 2 x 2 ranks with a causal mask and float32, four passes change
anything: `receives_first` and `drained`, and forward `merged` and `keys_by_token`.  A first reader
can skip the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from a2d_mpi.schedules import steps
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS, Rows


def lowered(p: Program, overlap: bool = True) -> Program:
    """Apply all passes, in the order in which they depend on each other."""
    alone, wire = p.group.rows * p.group.cols == 1, p.group.config.wire
    if alone or wire or not overlap:
        from a2d_mpi.schedules import options
    if not overlap:
        p = options.in_turn(p)
    p = gradients_by_token(keys_by_token(merged(receives_first(p))))
    if wire:
        p = options.encoded(p)
    p = packed(p)
    if alone:
        p = options.alone(p)
    return drained(p)


def merged(p: Program) -> Program:
    """Compute partial results that are to be merged apart; leave them out if nothing is seen.

    The compensation of lse is set to zero before the first merge.
    """
    new, compensated = p.with_steps(), set()
    partials: dict[Rows, Rows] = {}
    for step in p.steps:
        if isinstance(step, steps.AttendAndMerge):
            queries, keys, target = step
            if not p.sees(queries, keys):
                continue
            if target not in partials:
                partials[target] = new.array_for(
                    f"partial {len(partials)}", target, memory="partial",
                    accumulated=KINDS["out"], as_computed=True,
                )  # fmt: skip
            new.attend(queries, keys, partials[target])
            step = steps.Merge(partials[target], target, new.compensation(target))
        if isinstance(step, steps.Merge) and step.compensation.array not in compensated:
            compensated.add(step.compensation.array)
            new.clear(new.rows(step.compensation.array))
        new.steps.append(step)
    return new


def keys_by_token(p: Program) -> Program:
    """Copy keys that are not in the order of tokens.

    Keys of one owner are.  Those of several owners are in a call only when all have arrived, so
    their array is copied whole before the first such call.
    """
    every = {x.keys for x in p.steps if isinstance(x, steps.KernelCall)}
    scattered, new = {x for x in every if not p.in_order(x)}, p.with_steps()
    copied: set[str] = set()  # arrays whose keys are copied
    for step in p.steps:
        if isinstance(step, steps.KernelCall) and step.keys in scattered:
            keys = _by_token(new, step.keys)
            if keys.array not in copied:
                copied.add(keys.array)
                new.copy(new.rows(step.keys.array), new.by_piece(keys.array))
            step = step._replace(keys=keys)
        new.steps.append(step)
    return new


def gradients_by_token(p: Program) -> Program:
    """Compute gradients of keys that `keys_by_token` copied in the same order; add them back."""
    new = p.with_steps()
    apart: dict[str, str] = {}  # arrays whose sums are not complete: where the others are

    def complete(arrays: Iterable[str]) -> None:
        for array in filter(apart.__contains__, arrays):
            new.add(steps.Add(new.by_piece(apart.pop(array)), new.rows(array)))

    for step in p.steps:
        if isinstance(step, steps.Differentiate) and p.arrays[step.keys.array].by_token:
            dkv = _by_token(new, step.dkv)
            if step.dkv.array not in apart:
                apart[step.dkv.array] = dkv.array
                new.clear(new.rows(dkv.array))
            step = step._replace(dkv=dkv)
        elif apart and not isinstance(step, steps.KernelCall | steps.Clear | steps.Receive):
            complete(x.array for x in step if isinstance(x, Rows))
        new.steps.append(step)
    complete([*apart])
    return new


def _by_token(p: Program, rows: Rows) -> Rows:
    """Declare an array by token; return its rows of the same tokens, as one run."""
    array, name = p.arrays[rows.array], f"{rows.array} by token"
    p.array(name, array.kind, array.pieces, accumulated=array.accumulated, by_token=True)
    if rows.count == array.length:
        return p.rows(name)
    first, last = p.extremes(rows)
    sorted_rows = p.rows_within(name, first, last + 1)
    if sorted_rows.count != rows.count:
        raise ValueError(
            f"a kernel call takes consecutive keys of {rows.array!r} in the order of tokens, "
            f"got {rows.count} of {sorted_rows.count} keys in [{first}, {last}]"
        )
    return sorted_rows


def packed(p: Program) -> Program:
    """Copy scattered rows side by side before they are sent: a message is one run of memory."""
    new, copies = p.with_steps(), {}
    for step in p.steps:
        if isinstance(step, steps.Send) and len(step.rows.runs) > 1:
            if (rows := step.rows) not in copies:
                name, array = f"packed {len(copies)}", p.arrays[rows.array]
                accumulated, wire = array.accumulated, array.wire
                copies[rows] = new.array_for(name, rows, accumulated=accumulated, wire=wire)
                new.copy(rows, copies[rows])
            step = step._replace(rows=copies[rows])
        new.steps.append(step)
    return new


def receives_first(p: Program) -> Program:
    """Post all receives before the first kernel call or wait: messages travel while kernels run.

    Receives before the first sends would delay these.
    """
    if p.group.ring:
        return p
    later = (i for i, x in enumerate(p.steps) if isinstance(x, steps.KernelCall | steps.Wait))
    first = next(later, 0)
    tail = sorted(p.steps[first:], key=lambda x: not isinstance(x, steps.Receive))
    return p.with_steps([*p.steps[:first], *tail])


def drained(p: Program) -> Program:
    """Wait at the end for all messages for which there is no wait."""
    new, posted = p.with_steps(p.steps), (x for x in p.steps if isinstance(x, steps.Message))
    waited = {x for step in p.steps if isinstance(step, steps.Wait) for x in step.messages}
    left = [x for x in posted if x.index not in waited]
    for channel in p.channels:
        if indices := tuple(x.index for x in left if x.channel == channel):
            new.steps.append(steps.Drain(channel, indices))
    return new
