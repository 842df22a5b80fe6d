"""Passes that few programs need: without overlap, with a narrow format, of one rank."""

from __future__ import annotations

from dataclasses import replace

from a2d_mpi.schedules import steps
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS, PARTIALS, SUMS, Rows, TokenArray


def in_turn(p: Program) -> Program:
    """Make messages end before the next kernel call: communicate and compute in turn.

    A program gathers, computes, and returns results.  The steps of a ring keep their order, and it
    waits for each exchange at once.
    """
    if not any(isinstance(x, steps.KernelCall) for x in p.steps):
        return p
    posted = {x.index: (i, x) for i, x in enumerate(p.steps) if isinstance(x, steps.Message)}

    def place(numbered: tuple[int, steps.Step]) -> float:
        i, step = numbered
        awaited = [posted[x] for x in step.messages] if isinstance(step, steps.Wait) else []
        if p.group.ring:
            # A wait for an exchange, or for rows that are not a partial result, follows the last
            # message.
            early = any(isinstance(x, steps.Send) or not _partial(p, x.rows) for _, x in awaited)
            return max(awaited)[0] + 0.5 if early else i
        if isinstance(step, steps.Message | steps.Wait):
            return 2 * _partial(p, awaited[0][1].rows if awaited else step.rows)
        if isinstance(step, steps.Copy | steps.Merge | steps.Add):
            return 2 * _partial(p, step.target)
        return 1

    return p.with_steps(x for _, x in sorted(enumerate(p.steps), key=place))


def encoded(p: Program) -> Program:
    """Encode rows in a narrow format before they are sent, and decode them when they arrive.

    Rows that arrived encoded are not encoded again.  Sums and partial results change, so they are
    encoded whenever they are sent.  A rank that sends rows of its shard encodes all of them, once.
    """
    new = p.with_steps()
    add = new.steps.append
    arrived: dict[int, tuple[Rows, Rows]] = {}  # by message: encoded rows, and decoded ones
    encoded_too: set[str] = set()  # arrays whose rows are there encoded, too

    def on_wire(rows: Rows) -> Rows:
        array, name = p.arrays[rows.array], f"{rows.array} on the wire"
        if name not in new.arrays:
            memory = f"{array.memory} on the wire"
            new.arrays[name] = replace(array, role="buffer", wire=True, memory=memory)
        return rows.of(name)

    for step in p.steps:
        array = p.arrays[step.rows.array] if isinstance(step, steps.Message) else None
        if array is None or not _encodes(p, array):
            add(step)
            awaited = step.messages if isinstance(step, steps.Wait) else ()
            new.steps += [steps.Decode(*arrived[x]) for x in awaited if x in arrived]
            continue
        rows = on_wire(step.rows)
        if isinstance(step, steps.Receive):
            arrived[step.index] = rows, step.rows
        elif array.kind in PARTIALS or step.rows.array not in encoded_too:
            source = p.rows(step.rows.array) if array.role == "given" else step.rows
            add(steps.Encode(source, on_wire(source)))
        if isinstance(step, steps.Receive) or array.role == "given":
            encoded_too.add(step.rows.array)
        add(step._replace(rows=rows))
    return new


def _partial(p: Program, rows: Rows) -> bool:
    return p.arrays[rows.array].kind in PARTIALS


def _encodes(p: Program, array: TokenArray) -> bool:
    """Return True if messages hold the tensors of an array in a narrow format."""
    sums = array.accumulated
    return any(p.group.config.rounds(x, x in sums) for x in KINDS[array.kind])


def alone(p: Program) -> Program:
    """Let the one kernel call of a group of one rank write the results: nothing is added up.

    Other context-parallel groups may add to dk and dv, which then keep the accumulation dtype.
    """
    own = {x.array for x in p.results.values()}
    calls = [x for x in p.steps if isinstance(x, steps.KernelCall)]
    if len(calls) != 1 or any(x not in calls[0] for x in map(p.rows, own)):
        return p
    new = p.with_steps(
        x._replace(fresh=True) if isinstance(x, steps.Differentiate) else x
        for x in p.steps
        if not (isinstance(x, steps.Clear) and x.rows.array in own)
    )
    for name in own:
        kept = SUMS if p.group.shares_kv else ("lse",)
        new.arrays[name] = replace(p.arrays[name], role="result", accumulated=kept)
    return new
