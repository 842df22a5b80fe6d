"""What a schedule sends, receives and holds, read off its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from a2d_mpi.core.chunks import chunks
from a2d_mpi.core.sizes import MAX_MESSAGE, Problem
from a2d_mpi.schedules.steps import KINDS, Attend, Message, Ranks, Rows, Schedule

WIDE = ("lse", "delta", "dq", "dk", "dv")  # sent as they are computed: sums, and statistics


def tensor_shape(group: Problem, name: str) -> tuple[int, ...]:
    """Shape of one token of a tensor."""
    heads = group.nheads_kv if name in ("k", "v", "dk", "dv") else group.nheads
    return (heads,) if name in ("lse", "delta") else (heads, group.headdim)


def tensor_bytes(group: Problem, name: str, wide: bool = False) -> int:
    """Bytes of a token of a tensor, as it is sent or, with `wide`, as it is computed."""
    element = group.compute_itemsize if wide or name in WIDE else group.itemsize
    return math.prod(tensor_shape(group, name)) * element


def messages(
    schedule: Schedule, group: Problem, sent: bool | None = None
) -> Iterator[tuple[Message, Ranks, list[int]]]:
    """Every message, or only those that are sent or received.

    With the tokens that it brings (an int if those of all ranks are as many), and the bytes of a
    token in each of its tensors.
    """
    even = len(set(group.counts)) == 1
    counts = np.array(group.counts) if np.ndim(schedule.me) else group.counts
    sizes = {x: [tensor_bytes(group, name) for name in names] for x, names in KINDS.items()}
    cuts: dict[int, list] = {}
    for step in schedule.steps:
        if isinstance(step, Message) and sent in (None, step.sent):
            rows, tokens = step.rows, counts
            if rows.part is not None:
                unit, ranks = rows.part
                if ranks not in cuts:
                    cuts[ranks] = _unit_counts(group.counts, ranks, counts)
                tokens = cuts[ranks][unit]
            yield (
                step,
                int(tokens[0]) if even else tokens[rows.owner],
                sizes[schedule.arrays[rows.array].kind],
            )


def _unit_counts(counts: tuple[int, ...], ranks: int, like) -> list:
    cuts = [[s.stop - s.start for s in chunks(n, ranks)] for n in counts]
    most = max(map(len, cuts))
    found = [[x[i] if i < len(x) else 0 for x in cuts] for i in range(most)]
    return [np.array(x) for x in found] if isinstance(like, np.ndarray) else found


def number_of_messages(nbytes: Ranks) -> Ranks:
    """MPI messages in which so many bytes travel."""
    return -(-nbytes // MAX_MESSAGE)


def buffers(schedule: Schedule, group: Problem, contiguous: bool) -> dict[object, int]:
    """Bytes of every buffer that a plan keeps for the schedule of one rank.

    Parameters
    ----------
    schedule : Schedule
    group : Problem
    contiguous : bool
        Whether the shards, one after the other, are in the order of tokens.
    """
    counts, found = group.counts, {}
    largest = _largest(schedule, counts)
    for name, array in schedule.arrays.items():
        if array.role == "buffer":
            owners = array.owners
            tokens = sum(counts[p] for p in owners) if owners else largest[name]
            for x in KINDS[array.kind]:
                found[name, x] = tokens * tensor_bytes(group, x)
    own = counts[schedule.me]
    if any(array.kind == "out" and array.role == "result" for array in schedule.arrays.values()):
        found["rest", "lse"] = own * tensor_bytes(group, "lse")
    if any(merged_at_once(schedule)):
        for x in KINDS["out"]:
            found["own", x] = own * tensor_bytes(group, x, wide=True)
    if not contiguous:
        for name in sorted_arrays(schedule):
            array = schedule.arrays[name]
            for x in KINDS[array.kind]:
                tokens = sum(counts[p] for p in array.owners)
                found[name, x, "sorted"] = tokens * tensor_bytes(group, x)
    return found


def merged_at_once(schedule: Schedule) -> list[bool]:
    """Of each kernel call, in order, whether its rows hold a partial result already (forward)."""
    written: set[Rows] = set()
    found = []
    for step in schedule.steps:
        if isinstance(step, Attend):
            found.append(step.keys_into is None and step.into in written)
            written.add(step.into)
    return found


def sorted_arrays(schedule: Schedule) -> set[str]:
    """Arrays of keys of several owners that a kernel call needs, or adds to, as a whole."""
    found = set()
    for step in schedule.steps:
        if isinstance(step, Attend) and step.keys.owner is None:
            found |= {x.array for x in (step.keys, step.keys_into) if x is not None}
    return {name for name in found if len(schedule.arrays[name].owners) > 1}


def _largest(schedule: Schedule, counts: tuple[int, ...]) -> dict[str, int]:
    """Tokens of the largest owner whose rows an array holds at a time, by its name."""
    found: dict[str, int] = {}
    for step in schedule.steps:
        for rows in vars(step).values():
            if isinstance(rows, Rows) and rows.owner is not None:
                found[rows.array] = max(found.get(rows.array, 0), counts[rows.owner])
    return found
