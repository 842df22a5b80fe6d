"""Places of rows in the arrays of one rank's schedule, and the tokens that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import numpy as np

from a2d_mpi.core.chunks import chunks, split_own_shard, splits_own_shard
from a2d_mpi.core.intervals import keys_per_query, queries_per_key
from a2d_mpi.core.meetings import size
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import Chosen, Meets, Span
from a2d_mpi.schedules.steps import FIRST, Array, Attend, Rows

# Some tokens of a shard: first and last place of each run of neighbours, (2 runs,) int64.
Edges = np.ndarray


class Places:
    """Places of rows in the arrays of the schedule of one rank.

    Parameters
    ----------
    schedule : Schedule
    splits : mapping of bool to list of slices, optional
        Slices of this rank's own queries (False) and keys (True) that are computed first and
        last, where the schedule has both.
    """

    def __init__(
        self, schedule: Schedule, splits: Mapping[bool, list[slice]] | None = None
    ) -> None:
        self._schedule, self._splits = schedule, splits or {}
        self._sizes, self._meetings = schedule.sizes, schedule.sizes.problem.meetings
        self._edges: dict[tuple, Edges] = {}
        self._slices: dict[Rows, list[slice]] = {}
        self._runs: dict[tuple, list[range]] = {}

    def pieces(self, rows: Rows) -> list[tuple[int, Edges]]:
        """Owners, and the tokens of each that the array has, in the order of its memory."""
        array = self._schedule.arrays[rows.array]
        return [(p, self._held(array, p, x)) for p, x in array.pieces or [(rows.owner, None)]]

    def total(self, rows: Rows) -> int:
        """Tokens of an array as a whole; of one without owners, of those of the rows' owner."""
        return sum(size(edges) for _, edges in self.pieces(rows))

    def count(self, rows: Rows) -> int:
        """Tokens of rows."""
        return sum(size(edges) for _, edges in self._chosen(rows))

    def runs(self, rows: Rows) -> list[range]:
        """Tokens of rows, in the order of their memory."""
        array = self._schedule.arrays[rows.array]
        alone = rows.owner is not None and array.meets is None and not array.spans
        key = array.of_keys if alone else rows.array, rows.owner, rows.part
        if key not in self._runs:
            shards = self._sizes.shards(array.of_keys)
            found = []
            for p, edges in self._chosen(rows):
                found += _at(shards.runs(p), edges)
            self._runs[key] = found
        return self._runs[key]

    def tokens(self, rows: Rows) -> np.ndarray:
        """Global indices of rows, (tokens,) int64, in the order of their memory."""
        found = (np.arange(r.start, r.stop, r.step) for r in self.runs(rows))
        return np.concatenate([np.zeros(0, np.int64), *found])

    def order(self, name: str) -> np.ndarray | None:
        """Places of an array's rows by token, (tokens,) int64; None: they are in that order."""
        runs = self.runs(Rows(name))
        if all(a[-1] < b[0] for a, b in pairwise(runs)):
            return None
        return np.argsort(self.tokens(Rows(name)))

    def slices(self, rows: Rows) -> list[slice]:
        """Places of rows of an owner in the memory of their array: few runs of neighbours."""
        if rows not in self._slices:
            self._slices[rows] = self._found(rows)
        return self._slices[rows]

    def common_runs(self, rows: Rows, others: Rows) -> list[tuple[int, int, slice, slice]]:
        """Runs of the same tokens in two arrays that lie side by side in both of them.

        The first and last token of each run, among all of them, and its places in both arrays.
        Empty if there is only one run, or if the rows are of several owners.
        """
        if rows.owner is None:
            return []
        found = [self.slices(x) for x in (rows, others)]
        if len(found[0]) == len(found[1]) == 1:
            return []
        where = [
            np.concatenate([np.arange(self.total(x))[part] for part in parts])
            for x, parts in zip((rows, others), found)
        ]
        # A run ends where the next token is no neighbour in one of the arrays.
        ends = np.flatnonzero(np.any([np.diff(x) != 1 for x in where], axis=0)) + 1
        return [
            (a, b, *(slice(x[a], x[b - 1] + 1) for x in where))
            for a, b in pairwise([0, *ends.tolist(), len(where[0])])
        ]

    def _found(self, rows: Rows) -> list[slice]:
        first, found, pieces = 0, [], self.pieces(rows)
        for (_, held), (_, chosen) in zip(pieces, self._chosen(rows, pieces)):
            if len(chosen):
                at = np.searchsorted(held[::2], chosen[::2], side="right") - 1
                before = np.cumsum([0, *(held[1::2] - held[::2])])
                begins = first + before[at] + chosen[::2] - held[::2][at]
                for a, n in zip(begins.tolist(), (chosen[1::2] - chosen[::2]).tolist()):
                    if found and found[-1].stop == a:
                        found[-1] = slice(found[-1].start, a + n)
                    else:
                        found.append(slice(a, a + n))
            first += size(held)
        return [slice(None)] if found == [slice(0, first)] else found or [slice(0, 0)]

    def _chosen(
        self, rows: Rows, pieces: list[tuple[int, Edges]] | None = None
    ) -> list[tuple[int, Edges]]:
        """The tokens of rows, piece by piece."""
        pieces = self.pieces(rows) if pieces is None else pieces
        if rows.part is None and rows.owner is None:
            return pieces
        found, of_keys = [], self._schedule.arrays[rows.array].of_keys
        for p, held in pieces:
            wanted = held[:0]
            if rows.owner in (None, p):
                wanted = self._part(rows, p, held, of_keys)
            found.append((p, wanted))
        return found

    def _part(self, rows: Rows, p: int, held: Edges, of_keys: bool) -> Edges:
        part = rows.part
        if isinstance(part, Span):
            place = self._sizes.shards(of_keys).place
            return _common(held, place(p, part.begin), place(p, part.end))
        if isinstance(part, Chosen):
            return np.array(part.edges, np.int64)
        if isinstance(part, Meets):
            held, part = self._meetings.places(of_keys, p, part.others), part.chunk
        if isinstance(part, str):
            whole = self._splits[of_keys][part != FIRST]
            return _cut(held, whole.start, whole.stop)
        if part is not None:
            found = chunks(size(held), part[1])[part[0]]
            return _cut(held, found.start, found.stop)
        return held

    def _held(self, array: Array, owner: int, span: Span | Chosen | Meets | None) -> Edges:
        """Tokens of an owner's shard that an array has."""
        own = bool(array.owners) and owner == self._schedule.rank
        if isinstance(span, Chosen):
            return np.array(span.edges, np.int64)
        others = span.others if isinstance(span, Meets) else None if own else array.meets
        if others is not None:
            return self._meetings.places(array.of_keys, owner, others)
        key = array.of_keys, owner, span
        if key not in self._edges:
            shards = self._sizes.shards(array.of_keys)
            ends = [0, self._sizes.counts(array.of_keys)[owner]]
            if span is not None:
                ends = [shards.place(owner, token) for token in span]
            self._edges[key] = np.array(ends if ends[0] < ends[1] else [], np.int64)
        return self._edges[key]


def own_cuts(splits: dict[bool, list[slice]]) -> Callable[[Schedule, Rows, Rows, int], bool]:
    """The function `Schedule.cuts` of one rank: by its visible pairs with the others.

    It puts the slices of the rank's own queries (False) and keys (True) into `splits`.
    """

    def cuts(schedule: Schedule, own: Rows, others: Rows, ranks: int) -> bool:
        side, sizes = schedule.arrays[own.array].of_keys, schedule.sizes
        mask, shard = sizes.problem.mask, sizes.shards(side).tokens(schedule.rank)
        if not splits_own_shard(len(shard), ranks):
            return False
        owners = schedule.arrays[others.array].owners
        tokens = np.concatenate([sizes.shards(not side).tokens(p) for p in owners])
        if side:
            areas = queries_per_key(mask.intervals(tokens, shard), len(shard))
        else:
            areas = keys_per_query(mask.intervals(shard, np.sort(tokens)))
        splits[side] = split_own_shard(areas, ranks)
        return len(splits[side]) > 1

    return cuts


def sorted_arrays(schedule: Schedule) -> set[str]:
    """Arrays of keys of several owners that a kernel call needs, or adds to, as a whole."""
    found = set()
    for step in schedule.steps:
        if isinstance(step, Attend) and step.keys.owner is None:
            found |= {x.array for x in (step.keys, step.keys_into) if x is not None}
    return {name for name in found if len(schedule.arrays[name].owners) > 1}


def _at(runs: Iterable[range], edges: Edges) -> list[range]:
    """The tokens at these places of runs that follow each other."""
    ends, found = list(zip(edges[::2].tolist(), edges[1::2].tolist())), []
    first = which = 0
    for run in runs:
        last = first + len(run)
        while which < len(ends) and ends[which][0] < last:
            begin, end = ends[which]
            if max(begin, first) < end:
                found.append(run[max(begin - first, 0) : end - first])
            if end > last:
                break  # the rest is in the next run
            which += 1
        first = last
    return found


def _cut(edges: Edges, first: int, last: int) -> Edges:
    """Some of the tokens, by their number among them."""
    if len(edges) == 2:  # mostly
        return edges[:0] if first >= last else edges[0] + np.array([first, last])
    lengths = edges[1::2] - edges[::2]
    before = np.cumsum(lengths) - lengths
    ends = [edges[::2] + np.clip(x - before, 0, lengths) for x in (first, last)]
    return np.stack(ends, axis=1)[ends[0] < ends[1]].ravel()


def _common(edges: Edges, begin: int, end: int) -> Edges:
    """Those of the tokens whose place in the shard is in [begin, end)."""
    ends = np.clip(edges, begin, max(begin, end)).reshape(-1, 2)
    return ends[ends[:, 0] < ends[:, 1]].ravel()
