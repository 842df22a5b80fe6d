"""What a schedule sends, receives and holds, read off its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from a2d_mpi.core.pieces import FIRST as FIRST_SHARE
from a2d_mpi.core.pieces import cut
from a2d_mpi.core.sizes import MAX_MESSAGE, Problem
from a2d_mpi.schedules.steps import (
    FIRST,
    KINDS,
    Array,
    Attend,
    Message,
    Ranks,
    Rows,
    Schedule,
)


def tensor_shape(group: Problem, name: str) -> tuple[int, ...]:
    """Shape of one token of a tensor."""
    heads = group.nheads_kv if name in ("k", "v", "dk", "dv") else group.nheads
    return (heads,) if name in ("lse", "delta") else (heads, group.headdim)


def tensor_bytes(group: Problem, name: str, wide: bool) -> int:
    """Bytes of a token of a tensor, as the caller has it or, with `wide`, as it is computed."""
    element = group.compute_itemsize if wide else group.itemsize
    return math.prod(tensor_shape(group, name)) * element


def array_bytes(group: Problem, array: Array) -> list[int]:
    """Bytes of a token of each tensor of an array; of a packed one, of all together."""
    sizes = [tensor_bytes(group, name, name in array.wide) for name in KINDS[array.kind]]
    return [sum(sizes)] if array.packed else sizes


class Tokens:
    """How many tokens rows have: an int, or an array with an entry for each rank.

    Parameters
    ----------
    schedule : Schedule
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._counts = schedule, schedule.sizes.counts
        self._all = np.ndim(schedule.me) > 0
        self._even = len(set(self._counts)) == 1
        self._units: dict[tuple[int, int] | None, Ranks] = {}
        self._found: dict[tuple, tuple[Ranks, Ranks]] = {}

    def of(self, rows: Rows) -> Ranks:
        """Tokens of rows; equal ones are the same object."""
        if rows.owner is None:
            key = rows.array, None
        else:
            key = id(rows.owner) if self._all else rows.owner, rows.part
        if key not in self._found:
            self._found[key] = self._count(rows), rows.owner
        return self._found[key][0]

    def _count(self, rows: Rows) -> Ranks:
        if rows.owner is None:
            owners = self._schedule.arrays[rows.array].owners
            return sum(self._of_owner(p, None) for p in owners)
        if isinstance(rows.part, str):
            share = FIRST_SHARE if rows.part == FIRST else 1 - FIRST_SHARE
            return share * self._of_owner(rows.owner, None)
        return self._of_owner(rows.owner, rows.part)

    def _of_owner(self, owner: Ranks, part: tuple[int, int] | None) -> Ranks:
        if part not in self._units:
            counts = self._counts
            if part is not None:
                unit, ranks = part
                cuts = [cut(n, ranks) for n in counts]
                counts = [x[unit].stop - x[unit].start if unit < len(x) else 0 for x in cuts]
            self._units[part] = np.array(counts) if self._all else counts
        counts = self._units[part]
        return int(counts[0]) if self._even else counts[owner]


def messages(
    schedule: Schedule, group: Problem, sent: bool | None = None
) -> Iterator[tuple[Message, Ranks, list[int]]]:
    """Every message, or only those that are sent or received.

    With the tokens that it brings (an int if those of all ranks are as many), and the bytes of a
    token in each of its tensors.
    """
    tokens = Tokens(schedule)
    sizes = {name: array_bytes(group, array) for name, array in schedule.arrays.items()}
    for step in schedule.steps:
        if isinstance(step, Message) and sent in (None, step.sent):
            yield step, tokens.of(step.rows), sizes[step.rows.array]


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
    counts, found = schedule.sizes.counts, {}
    largest = _largest(schedule, counts)
    for name, array in schedule.arrays.items():
        if array.role == "buffer":
            owners = array.owners
            tokens = sum(counts[p] for p in owners) if owners else largest[name]
            for x, nbytes in enumerate(array_bytes(group, array)):
                found[name, x] = tokens * nbytes
    own = counts[schedule.me]
    if any(merged_at_once(schedule)):
        for x in KINDS["out"]:
            found["own", x] = own * tensor_bytes(group, x, wide=True)
    if merges_partials(schedule):
        found["rest", "lse"] = own * tensor_bytes(group, "lse", wide=True)
    if not contiguous:
        for name in sorted_arrays(schedule):
            array = schedule.arrays[name]
            tokens = sum(counts[p] for p in array.owners)
            for x, nbytes in enumerate(array_bytes(group, array)):
                found[name, x, "sorted"] = tokens * nbytes
    return found


def merges_partials(schedule: Schedule) -> bool:
    """Whether it makes results from partial ones with an lse, which a compensation goes with."""
    return any(isinstance(x, Attend) and x.keys_into is None for x in schedule.steps)


def merged_at_once(schedule: Schedule) -> list[bool]:
    """Of each kernel call, in order, whether its rows hold a partial result already (forward)."""
    written: set[tuple] = set()
    found = []
    for step in schedule.steps:
        if isinstance(step, Attend):
            into = step.into
            key = into.array, id(into.owner) if np.ndim(schedule.me) else into.owner, into.part
            found.append(step.keys_into is None and key in written)
            written.add(key)
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
