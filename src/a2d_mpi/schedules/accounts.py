"""Bytes, messages and buffers of a schedule, read off its steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from a2d_mpi.core.chunks import FIRST_SHARE, chunks
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.meetings import Others, Ranks
from a2d_mpi.core.sizes import MAX_MESSAGE
from a2d_mpi.schedules.places import Places, sorted_arrays
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import Meets, identity
from a2d_mpi.schedules.steps import FIRST, KINDS, Array, Attend, Merge, Message, Rows


def array_bytes(group: AttentionConfig, array: Array) -> list[int]:
    """Bytes of a token of each tensor of an array; of a packed one, of all together."""
    sizes = [group.nbytes(name, name in array.wide) for name in KINDS[array.kind]]
    return [sum(sizes)] if array.packed else sizes


class Tokens:
    """Numbers of tokens of rows: an int, or an array with an entry for each rank.

    Parameters
    ----------
    schedule : Schedule

    Attributes
    ----------
    places : Places or None
        Of the schedule of one rank.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._sizes = schedule, schedule.sizes
        self.places = None if np.ndim(schedule.rank) else Places(schedule)
        self._by_chunk: dict[tuple[bool, tuple[int, int] | None], Ranks] = {}
        self._found: dict[tuple, tuple[Ranks, Rows]] = {}

    def of(self, rows: Rows) -> Ranks:
        """Tokens of rows; equal ones are the same object."""
        array = self._schedule.arrays[rows.array]
        alike = rows.array if rows.owner is None or array.meets or array.spans else array.of_keys
        key = alike, None if rows.owner is None else identity(rows.owner), rows.part
        if key not in self._found:
            self._found[key] = self._count(rows, array), rows  # kept: no other gets the same id
        return self._found[key][0]

    def _count(self, rows: Rows, array: Array) -> Ranks:
        if isinstance(rows.part, str):
            share = FIRST_SHARE if rows.part == FIRST else 1 - FIRST_SHARE
            return share * self.of(rows._replace(part=None))
        if self.places is not None:
            return self.places.count(rows)
        if rows.owner is None:
            return sum(self._held(array, p) for p in array.owners)
        if isinstance(rows.part, Meets):
            found = self._meeting(array.of_keys, rows.owner, rows.part.others)
            for others, some in ((rows.part.provided, True), (rows.part.unless, False)):
                if others is not None:
                    found = found * (
                        (self._meeting(array.of_keys, rows.owner, others) > 0) == some
                    )
            return found if rows.part.chunk is None else _chunk(found, rows.part.chunk)
        if array.meets is None and not array.spans:
            return self._shards(array.of_keys, rows.owner, rows.part)
        held = self._held(array, rows.owner)
        return held if rows.part is None else _chunk(held, rows.part)

    def _held(self, array: Array, owner: Ranks) -> Ranks:
        """Tokens that an array has of an owner."""
        whole = self._shards(array.of_keys, owner)
        if array.spans:
            (span,) = (x for p, x in array.pieces if p is owner)
            return whole if span is None else self._meeting(array.of_keys, owner, span.others)
        if array.meets is None or (array.owners and owner is self._schedule.rank):
            return whole
        found = self._meeting(array.of_keys, owner, array.meets)
        return np.where(owner == self._schedule.rank, whole, found) if array.owners else found

    def _meeting(self, of_keys: bool, owner: Ranks, others: Others) -> Ranks:
        return self._sizes.problem.meetings.count(of_keys, owner, others)

    def _shards(self, of_keys: bool, owner: Ranks, part: tuple[int, int] | None = None) -> Ranks:
        """Tokens of whole shards, or of a chunk of each."""
        key = of_keys, part
        if key not in self._by_chunk:
            counts = np.array(self._sizes.counts(of_keys))
            self._by_chunk[key] = counts if part is None else _chunk(counts, part)
        counts = self._by_chunk[key]
        return int(counts[0]) if (counts == counts[0]).all() else counts[owner]


def tokens_of(schedule: Schedule) -> Tokens:
    """The numbers of tokens of the rows of a schedule; kept, as several readers want them."""
    if schedule.counted is None:
        schedule.counted = Tokens(schedule)
    return schedule.counted


def _chunk(tokens: np.ndarray, part: tuple[int, int]) -> np.ndarray:
    """Tokens of the i-th of the chunks in which so many tokens travel."""
    i, ranks = part
    different, which = np.unique(tokens, return_inverse=True)
    cuts = [chunks(n, ranks) for n in different.tolist()]
    return np.array([x[i].stop - x[i].start if i < len(x) else 0 for x in cuts])[which]


def messages(
    schedule: Schedule, group: AttentionConfig, sent: bool | None = None
) -> Iterator[tuple[Message, Ranks, list[int]]]:
    """Yield every message, or only those that are sent or received.

    With the number of its tokens (an int if it is the same for all ranks), and the bytes of a
    token in each of its tensors.
    """
    tokens = tokens_of(schedule)
    sizes = {name: array_bytes(group, array) for name, array in schedule.arrays.items()}
    for step in schedule.steps:
        if isinstance(step, Message) and sent in (None, step.sent):
            yield step, tokens.of(step.rows), sizes[step.rows.array]


def number_of_messages(nbytes: Ranks) -> Ranks:
    """MPI messages in which so many bytes travel."""
    return -(-nbytes // MAX_MESSAGE)


def buffers(schedule: Schedule, group: AttentionConfig) -> dict[object, Ranks]:
    """Bytes of every buffer that a plan keeps for a schedule.

    Of all ranks at once: as if own partial results were as wide as sums (a kernel of 16 bits makes
    them narrower), as if keys were in the order of tokens only where all shards are
    contiguous, and without copies of rows that are sent and do not lie side by side.
    """
    tokens, found = tokens_of(schedule), {}
    places = tokens.places

    def add(key: object, nbytes: Ranks) -> None:
        found[key] = np.maximum(nbytes, found.get(key, 0))

    for rows in _held(schedule):
        array = schedule.arrays[rows.array]
        if array.role == "buffer":
            for x, nbytes in _named(group, array):
                add((array.room or rows.array, x), tokens.of(rows) * nbytes)
    if any(merged_at_once(schedule)):
        own = tokens.of(Rows(schedule.results["out"].array))
        for x in KINDS["out"]:
            add(("own", x), own * group.nbytes(x, wide=True))
    for rows in merged_rows(schedule):
        add((rows.array, "rest"), tokens.of(rows) * group.nbytes("lse"))
    for name in sorted_arrays(schedule):
        unsorted = schedule.sizes.shards(True).name != "contiguous"
        if unsorted if places is None else places.order(name) is not None:
            for x, nbytes in _named(group, schedule.arrays[name]):
                add((name, x, "sorted"), tokens.of(Rows(name)) * nbytes)
    for number, rows in enumerate(packed(schedule, places) if places else ()):
        for x, nbytes in _named(group, schedule.arrays[rows.array]):
            add(("packed", number, x), tokens.of(rows) * nbytes)
    return found


def packed(schedule: Schedule, places: Places) -> list[Rows]:
    """Rows that are sent, to however many ranks, and do not lie side by side: each once."""
    sent = dict.fromkeys(x.rows for x in schedule.steps if isinstance(x, Message) and x.sent)
    return [x for x in sent if x.owner is not None and len(places.slices(x)) > 1]


def _named(group: AttentionConfig, array: Array) -> Iterator[tuple[str, int]]:
    """Names of an array's buffers, and bytes of a token in each."""
    return zip(("all",) if array.packed else KINDS[array.kind], array_bytes(group, array))


def results(schedule: Schedule, group: AttentionConfig, whole: AttentionConfig) -> int:
    """Bytes of the new arrays that one rank makes for the results of a schedule."""
    tokens = tokens_of(schedule)
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


def _held(schedule: Schedule) -> list[Rows]:
    """All that arrays hold: of an array without owners, the rows of each owner in turn."""
    found = {name: Rows(name) for name, array in schedule.arrays.items() if array.owners}
    for step in schedule.steps:
        for rows in vars(step).values():
            if isinstance(rows, Rows) and rows.array not in found:
                key = rows.array, identity(rows.owner)
                found.setdefault(key, Rows(rows.array, rows.owner))
    return list(found.values())
