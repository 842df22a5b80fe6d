"""Bytes, messages and buffers of a schedule, read off its steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from a2d_mpi.core.chunks import FIRST_SHARE, chunks
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import MAX_MESSAGE
from a2d_mpi.schedules.sizes import Ranks, Span, identity
from a2d_mpi.schedules.steps import FIRST, KINDS, Array, Attend, Merge, Message, Rows, Schedule


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
        key = (rows.array if rows.owner is None else identity(rows.owner), rows.part)
        if key not in self._found:
            self._found[key] = self._count(rows), rows.owner
        return self._found[key][0]

    def _count(self, rows: Rows) -> Ranks:
        if rows.owner is None:
            pieces = self._schedule.arrays[rows.array].pieces
            return sum(self._of_owner(p, common(span, rows.part)) for p, span in pieces)
        if isinstance(rows.part, str):
            share = FIRST_SHARE if rows.part == FIRST else 1 - FIRST_SHARE
            return share * self._of_owner(rows.owner, None)
        return self._of_owner(rows.owner, rows.part)

    def _of_owner(self, owner: Ranks, part: tuple[int, int] | None) -> Ranks:
        if isinstance(part, Span):
            where = self._schedule.sizes.within(owner, part)
            return where.stop - where.start
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
    counts, tokens, found = schedule.sizes.counts, Tokens(schedule), {}
    largest = _largest(schedule, counts)
    for name, array in schedule.arrays.items():
        if array.role == "buffer":
            n = tokens.of(Rows(name)) if array.owners else largest[name]
            for x, nbytes in _named(group, array):
                found[name, x] = n * nbytes
    if any(merged_at_once(schedule)):
        for x in KINDS["out"]:
            found["own", x] = counts[schedule.rank] * group.nbytes(x, wide=True)
    for rows in merged_rows(schedule):
        found[rows.array, "rest"] = tokens.of(rows) * group.nbytes("lse")
    if not contiguous:
        for name in sorted_arrays(schedule):
            if not _in_order(schedule, name):
                for x, nbytes in _named(group, schedule.arrays[name]):
                    found[name, x, "sorted"] = tokens.of(Rows(name)) * nbytes
    return found


def _in_order(schedule: Schedule, name: str) -> bool:
    """Tell whether the spans of an array are in the order of tokens; of whole shards, no."""
    array = schedule.arrays[name]
    if not array.spans:
        return False
    shards = schedule.sizes.shards
    runs = [x for p, span in array.pieces for x in shards.within(p, *span)]
    return all(a.stop <= b.start for a, b in pairwise(runs))


def _named(group: AttentionConfig, array: Array) -> Iterator[tuple[str, int]]:
    """Names of an array's buffers, and bytes of a token in each."""
    return zip(("all",) if array.packed else KINDS[array.kind], array_bytes(group, array))


def results(schedule: Schedule, group: AttentionConfig, whole: AttentionConfig) -> int:
    """Bytes of the new arrays that one rank makes for the results of a schedule."""
    tokens = Tokens(schedule)
    return sum(
        tokens.of(Rows(name)) * sum(array_bytes(whole if array.all_heads else group, array))
        for name, array in schedule.arrays.items()
        if array.role == "result"
    )


def merged_rows(schedule: Schedule) -> list[Rows]:
    """Partial results, with an lse, that are merged with others: each array once, in order.

    Their lse has a compensation for what merges round off.
    """
    merges, found = iter(merged_at_once(schedule)), {}
    for step in schedule.steps:
        rows = None
        if isinstance(step, Attend) and next(merges):
            rows = step.into
        elif isinstance(step, Merge) and schedule.arrays[step.to.array].kind == "out":
            rows = step.to
        if rows is not None:
            owner = None if schedule.arrays[rows.array].owners else rows.owner
            found[rows.array] = Rows(rows.array, owner)
    return list(found.values())


def merged_at_once(schedule: Schedule) -> list[bool]:
    """Flags of the kernel calls in order: the rows hold a partial result already (forward)."""
    written: set[tuple] = set()
    found = []
    for step in schedule.steps:
        if isinstance(step, Attend):
            rows = step.into.array, identity(step.into.owner)
            held = not written.isdisjoint({(*rows, None), (*rows, step.into.part)})
            found.append(step.keys_into is None and held)
            written.add((*rows, step.into.part))
    return found


def sorted_arrays(schedule: Schedule) -> set[str]:
    """Arrays of keys of several owners that a kernel call needs, or adds to, as a whole."""
    found = set()
    for step in schedule.steps:
        if isinstance(step, Attend) and step.keys.owner is None:
            found |= {x.array for x in (step.keys, step.keys_into) if x is not None}
    return {name for name in found if len(schedule.arrays[name].owners) > 1}


def common(span: Span | None, part: Span | None) -> Span | None:
    """The tokens of a part among those that an array has of an owner; None: the whole shard."""
    if span is None or part is None:
        return part or span
    begin = max(span.begin, part.begin)
    return Span(begin, max(begin, min(span.end, part.end)))


def _largest(schedule: Schedule, counts: tuple[int, ...]) -> dict[str, int]:
    """Tokens of the largest owner whose rows an array holds at a time, by its name."""
    found: dict[str, int] = {}
    for step in schedule.steps:
        for rows in vars(step).values():
            if isinstance(rows, Rows) and rows.owner is not None:
                found[rows.array] = max(found.get(rows.array, 0), counts[rows.owner])
    return found
