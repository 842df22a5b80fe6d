"""Bytes, messages and buffers of a schedule, read off its steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from a2d_mpi.core.chunks import FIRST_SHARE, chunks
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import MAX_MESSAGE
from a2d_mpi.schedules.steps import (
    FIRST,
    KINDS,
    Array,
    Attend,
    Merge,
    Message,
    Ranks,
    Rows,
    Schedule,
    identity,
)


def array_bytes(group: AttentionConfig, array: Array) -> list[int]:
    """Bytes of a token of each tensor of an array; of a packed one, of all together."""
    sizes = [group.nbytes(name, name in array.wide) for name in KINDS[array.kind]]
    return [sum(sizes)] if array.packed else sizes


class Tokens:
    """Numbers of tokens of rows: an int, or an array with an entry for each rank.

    Parameters
    ----------
    schedule : Schedule
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._counts = schedule, schedule.sizes.counts
        self._all = np.ndim(schedule.rank) > 0
        self._even = len(set(self._counts)) == 1
        self._by_chunk: dict[tuple[int, int] | None, Ranks] = {}
        self._found: dict[tuple, tuple[Ranks, Ranks]] = {}

    def of(self, rows: Rows) -> Ranks:
        """Tokens of rows; equal ones are the same object."""
        key = (rows.array, None) if rows.owner is None else (identity(rows.owner), rows.part)
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
        if part not in self._by_chunk:
            counts = self._counts
            if part is not None:
                i, ranks = part
                cuts = [chunks(n, ranks) for n in counts]
                counts = [x[i].stop - x[i].start if i < len(x) else 0 for x in cuts]
            self._by_chunk[part] = np.array(counts) if self._all else counts
        counts = self._by_chunk[part]
        return int(counts[0]) if self._even else counts[owner]


def messages(
    schedule: Schedule, group: AttentionConfig, sent: bool | None = None
) -> Iterator[tuple[Message, Ranks, list[int]]]:
    """Yield every message, or only those that are sent or received.

    With the number of its tokens (an int if it is the same for all ranks), and the bytes of a
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


def buffers(schedule: Schedule, group: AttentionConfig, contiguous: bool) -> dict[object, int]:
    """Bytes of every buffer that a plan keeps for the schedule of one rank.

    Parameters
    ----------
    schedule : Schedule
    group : AttentionConfig
    contiguous : bool
        Whether the shards, one after the other, are in the order of tokens.
    """
    counts, found = schedule.sizes.counts, {}
    largest = _largest(schedule, counts)
    for name, array in schedule.arrays.items():
        if array.role == "buffer":
            owners = array.owners
            tokens = sum(counts[p] for p in owners) if owners else largest[name]
            for x, nbytes in _named(group, array):
                found[name, x] = tokens * nbytes
    own = counts[schedule.rank]
    if any(merged_at_once(schedule)):
        for x in KINDS["out"]:
            found["own", x] = own * group.nbytes(x, wide=True)
    for rows in merged_rows(schedule):
        found["rest", rows.array] = counts[rows.owner] * group.nbytes("lse")
    if not contiguous:
        for name in sorted_arrays(schedule):
            array = schedule.arrays[name]
            tokens = sum(counts[p] for p in array.owners)
            for x, nbytes in _named(group, array):
                found[name, x, "sorted"] = tokens * nbytes
    return found


def _named(group: AttentionConfig, array: Array) -> Iterator[tuple[str, int]]:
    """Names of an array's buffers, and bytes of a token in each."""
    return zip(("all",) if array.packed else KINDS[array.kind], array_bytes(group, array))


def results(schedule: Schedule, group: AttentionConfig, whole: AttentionConfig) -> int:
    """Bytes of the new arrays that one rank makes for the results of a schedule."""
    return sum(
        sum(schedule.sizes.counts[p] for p in array.owners)
        * sum(array_bytes(whole if array.all_heads else group, array))
        for array in schedule.arrays.values()
        if array.role == "result"
    )


def merged_rows(schedule: Schedule) -> list[Rows]:
    """Rows with an lse into which partial results are merged: it has a compensation."""
    calls, arrays = iter(merged_at_once(schedule)), schedule.arrays
    found = {}
    for step in schedule.steps:
        if isinstance(step, Attend) and next(calls):
            found[step.into.array] = step.into
        elif isinstance(step, Merge) and arrays[step.to.array].kind == "out":
            found[step.to.array] = step.to
    return [rows._replace(part=None) for rows in found.values()]


def merged_at_once(schedule: Schedule) -> list[bool]:
    """Flags of the kernel calls in order: the rows hold a partial result already (forward)."""
    written: set[tuple] = set()
    found = []
    for step in schedule.steps:
        if isinstance(step, Attend):
            key = step.into.array, identity(step.into.owner), step.into.part
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
