"""Programs: the arrays and the steps of one rank in one phase, and the rows that hold tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from copy import copy as clone
from itertools import pairwise
from typing import Any

import numpy as np

from a2d_mpi.masks.intervals import Runs, common, cut
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.schedules import steps
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.slices import ATTEND
from a2d_mpi.schedules.steps import KINDS, KINDS_OF_KEYS, SUMS, Message, Rows, Step, TokenArray
from a2d_mpi.sharding.progressions import concatenated, progressions, ranks_among
from a2d_mpi.sharding.visibility import sees

Buffers = Counter[tuple[str, int, bool]]  # bytes, see `Program.buffers`


class Program:
    """Everything that one rank does in one phase: its arrays, and the steps that use them.

    A method appends steps that say what happens.  What this costs (packing, order of keys,
    waits at the end) is added by `a2d_mpi.schedules.passes`.

    Parameters
    ----------
    group : Group
    rank : int
        Rank in the group.
    ranks : range
        Rank in the layout of every rank of the group.
    stage : int
        `a2d_mpi.schedules.slices.TAKE`, `ATTEND` or `PUT`.

    Attributes
    ----------
    group, rank, ranks, stage
        As above.
    arrays : dict of str to TokenArray
    mask : Mask
        Mask of the group's problem.
    channels : dict of str to tuple of int
        The ranks of the group in each channel, in the order of their ranks in the channel.
    steps : list of Step
    messages : int
        Number of messages, sent and received.
    results : dict of str to Rows
        Rows that hold the results of this rank's shard at the end, by kind.
    slice : int
        Which slice it belongs to, counted from 0; `a2d_mpi.schedules.pipeline` numbers them.
    """

    def __init__(self, group: Group, rank: int, ranks: range, stage: int = ATTEND) -> None:
        self.group, self.rank, self.ranks, self.mask = group, rank, ranks, group.problem.mask
        self.stage = stage
        self.arrays: dict[str, TokenArray] = {}
        self.channels: dict[str, tuple[int, ...]] = {}
        self.steps: list[Step] = []
        self.results: dict[str, Rows] = {}
        self.slice = self.messages = 0
        self._turns: Counter[tuple] = Counter()  # messages so far, by what `Message.turn` counts
        # Results of the methods below, which programs ask for many times.
        self._by_token: dict[str, list[list[range]]] = {}
        self._token_runs: dict[Rows, list[range]] = {}
        self._extremes: dict[Rows, tuple[int, int]] = {}

    def with_steps(self, other: Iterable[Step] = ()) -> Program:
        """Return a program with the same arrays and other steps, for a pass."""
        new = clone(self)
        new.arrays, new.steps = dict(self.arrays), list(other)
        return new

    @property
    def copied(self) -> list[Rows]:
        """Results that lie in buffers, of which the caller gets copies."""
        return [x for x in self.results.values() if self.arrays[x.array].role == "buffer"]

    @property
    def buffers(self) -> Buffers:
        """Bytes of every buffer that a plan keeps for the program.

        By the name of the memory (`TokenArray.memory`), the number of the tensor, and whether its
        rows belong to keys.  Partial results are taken to have the accumulation dtype.
        """
        sizes: Buffers = Counter()
        for array in self.arrays.values():
            if array.role == "buffer":
                for i, size in enumerate(self.group.row_bytes(array)):
                    key = array.memory, i, array.of_keys
                    sizes[key] = max(sizes[key], array.length * size)
        return sizes

    # Messages.

    def receive(self, channel: str, peer: int, rows: Rows, tag: int = 0) -> steps.Receive | None:
        """Start receiving rows; return the message, or None without rows."""
        return self._post(steps.Receive, channel, peer, rows, tag)

    def send(self, channel: str, peer: int, rows: Rows, tag: int = 0) -> steps.Send | None:
        """Start sending rows; return the message, or None without rows."""
        return self._post(steps.Send, channel, peer, rows, tag)

    def wait(self, messages: Iterable[Message | None]) -> None:
        """Block until messages of one channel are done."""
        if posted := [x for x in messages if x]:
            self.steps.append(steps.Wait(posted[0].channel, tuple(x.index for x in posted)))

    def _post(
        self, way: type[Message], channel: str, peer: int, rows: Rows, tag: int
    ) -> Message | None:
        if not rows.runs:
            return None
        key = way, channel, peer, self.arrays[rows.array].kind, tag
        message = way(channel, peer, rows, tag, self._turns[key], self.messages)
        self._turns[key] += 1
        self.messages += 1
        self.steps.append(message)
        return message

    # Work.

    def add(self, step: Step) -> None:
        """Append a step that works on rows, unless there are none."""
        if step[0].runs:
            self.steps.append(step)

    def copy(self, source: Rows, target: Rows) -> None:
        """Copy rows."""
        self.add(steps.Copy(source, target))

    def clear(self, rows: Rows) -> None:
        """Set rows to zero."""
        self.add(steps.Clear(rows))

    def zeros(self, name: str, kind: str, like: str) -> str:
        """Declare and clear an array for the rows of the array `like`; return its name."""
        self.clear(self.rows(self.array(name, kind, self.arrays[like].pieces)))
        return name

    def attend(self, queries: Rows, keys: Rows, target: Rows) -> None:
        """Write the partial result of queries over keys: the first one of these rows.

        All rows of a result need it, even if nothing is visible.
        """
        self.add(steps.Attend(queries, keys, target))

    def attend_and_merge(self, queries: Rows, keys: Rows, target: Rows) -> None:
        """Merge the partial result of queries over keys into rows that hold another one."""
        self.add(steps.AttendAndMerge(queries, keys, target))

    def differentiate(self, queries: Rows, keys: Rows, dq: Rows, dkv: Rows) -> None:
        """Add gradients, in one kernel call for each run of keys."""
        if self.sees(queries, keys):
            for k_run, dkv_run in common_rows(keys, dkv):
                self.steps.append(steps.Differentiate(queries, k_run, dq, dkv_run))

    def combine(self, source: Rows, target: Rows) -> None:
        """Merge a partial result into rows of the same kind, or add a sum to them."""
        if self.arrays[target.array].kind != "out":
            self.add(steps.Add(source, target))
        elif source.runs:
            self.add(steps.Merge(source, target, self.compensation(target)))

    def compensation(self, rows: Rows) -> Rows:
        """Declare the compensation of lse in merges into rows; return its rows."""
        pieces = self.arrays[rows.array].pieces
        name = self.array(f"compensation of {rows.array}", "compensation", pieces)
        return rows.of(name)

    # Arrays and tokens.

    def array(
        self, name: str, kind: str, pieces: Iterable[tuple[int, Runs]], **options: Any
    ) -> str:
        """Declare an array, see `a2d_mpi.schedules.steps.TokenArray`; return its name.

        By default all tensors of results have the accumulation dtype.
        """
        if name not in self.arrays:
            accumulated = KINDS[kind] if options.get("role") == "result" else SUMS
            options = {"accumulated": accumulated, "memory": name, **options}
            self.arrays[name] = TokenArray(kind, tuple(pieces), **options)
        return name

    def array_for(self, name: str, rows: Rows, **options: Any) -> Rows:
        """Declare an array of the same kind for the tokens of rows; return all its rows."""
        kind = self.arrays[rows.array].kind
        return self.rows(self.array(name, kind, self.pieces(rows), **options))

    def own(self, name: str, kind: str, role: str = "buffer", **options: Any) -> Rows:
        """Declare an array of this rank's shard; return all its rows."""
        places = self.group.all_places(kind in KINDS_OF_KEYS, self.rank)
        return self.rows(self.array(name, kind, [(self.rank, places)], role=role, **options))

    def rows(self, name: str, owner: int | None = None, places: Runs | None = None) -> Rows:
        """Return rows of an array.

        Parameters
        ----------
        name : str
            Name of the array.
        owner : int, optional
            Only rows of this owner's tokens.  Default: all rows.
        places : Runs, optional
            Only rows of the tokens at these places of the owner's shard; not for an array by
            token.  Default: all places.
        """
        array = self.arrays[name]
        if owner is None:
            return Rows(name, (range(array.length),) if array.length else ())
        if array.by_token:
            found = zip(array.pieces, self._runs_by_token(name))
            return Rows(name, tuple(run for (x, _), of in found if x == owner for run in of))
        return _rows_at(name, ((*x, places) for x in array.by_owner.get(owner, ())))

    def rows_within(self, name: str, begin: int, end: int) -> Rows:
        """Return the rows of the tokens in ``[begin, end)``, of all owners."""
        array = self.arrays[name]
        owners, pieces = self.group.distribution(array.of_keys), zip(array.offsets, array.pieces)
        if not array.by_token:
            wanted = ((begin, end),)
            return _rows_at(name, ((i, own, owners.places(x, wanted)) for i, (x, own) in pieces))
        tokens = self.tokens(self.rows(name))
        first, last = np.searchsorted(tokens, (begin, end)).tolist()
        return Rows(name, (range(first, last),) if first < last else ())

    def matching(self, name: str, rows: Rows) -> Rows:
        """Return the rows of the array `name` for the tokens of `rows`."""
        owned, pieces = self.arrays[name].by_owner, self.pieces(rows)
        return _rows_at(name, ((*x, wanted) for y, wanted in pieces for x in owned.get(y, ())))

    def pieces(self, rows: Rows) -> list[tuple[int, Runs]]:
        """Return the owners of rows and the places in their shards.

        The array of the rows must not be by token.
        """
        pieces, offsets = self.arrays[rows.array].pieces, self.arrays[rows.array].offsets
        own = []
        for run in rows.runs:
            i = bisect_right(offsets, run.start) - 1
            while i < len(pieces) and offsets[i] < run.stop:
                first, last = run.start - offsets[i], run.stop - offsets[i]
                owner, places = pieces[i]
                if first > 0 or last < offsets[i + 1] - offsets[i]:
                    places = cut(places, max(first, 0), last)
                if places:
                    own.append((owner, places))
                i += 1
        return own

    def token_runs(self, rows: Rows) -> list[range]:
        """Return the tokens of rows as progressions.

        For all rows of an array by token, the progressions are not in the order of the rows.
        """
        if rows not in self._token_runs:
            array = self.arrays[rows.array]
            if array.by_token and rows.count < array.length:
                return progressions(self.tokens(rows))
            owners = self.group.distribution(array.of_keys)
            pieces = array.pieces if rows.count == array.length else self.pieces(rows)
            runs = [r for owner, places in pieces for r in owners.at(owner, places)]
            self._token_runs[rows] = runs
        return self._token_runs[rows]

    def tokens(self, rows: Rows) -> np.ndarray:
        """Return the token of every row, (rows,) int64, in the order of the rows."""
        array = self.arrays[rows.array]
        if array.by_token:
            of_array = self.token_runs(Rows(rows.array, (range(array.length),)))
            return np.sort(concatenated(of_array), kind="stable")[index_of(rows)]
        return concatenated(self.token_runs(rows))

    def extremes(self, rows: Rows) -> tuple[int, int]:
        """Return the first and the last token of rows."""
        if rows not in self._extremes:
            runs = self.token_runs(rows)
            self._extremes[rows] = min(r[0] for r in runs), max(r[-1] for r in runs)
        return self._extremes[rows]

    def sees(self, queries: Rows, keys: Rows) -> bool:
        """Return True if any of the queries sees any of the keys."""
        if not (queries.runs and keys.runs):
            return False
        if type(self.mask) is Full:
            return True
        if type(self.mask) is Causal:
            return self.extremes(queries)[1] >= self.extremes(keys)[0]
        runs = self.token_runs(queries), self.token_runs(keys)
        return sees(self.group.problem.seen, *runs)

    def in_order(self, rows: Rows) -> bool:
        """Return True if rows are in the order of tokens."""
        runs = rows.runs if self.arrays[rows.array].by_token else self.token_runs(rows)
        return all(a[-1] < b[0] for a, b in pairwise(runs))

    def by_piece(self, name: str) -> Rows:
        """Return all rows of an array by token, in the order of its pieces."""
        return Rows(name, tuple(run for runs in self._runs_by_token(name) for run in runs))

    def _runs_by_token(self, name: str) -> list[list[range]]:
        """Return the rows of every piece of an array by token."""
        if name not in self._by_token:
            array = self.arrays[name]
            owners = self.group.distribution(array.of_keys)
            self._by_token[name] = ranks_among([owners.at(*piece) for piece in array.pieces])
        return self._by_token[name]


def held_bytes(several: Iterable[Buffers]) -> int:
    """Return the bytes of all buffers of programs, which use each other's buffers."""
    largest: Buffers = Counter()
    for buffers in several:
        largest |= buffers
    return largest.total()


def index_of(rows: Rows) -> np.ndarray:
    """Return the numbers of rows in the memory of their array, (rows,) int64."""
    return concatenated(rows.runs)


def common_rows(source: Rows, target: Rows) -> list[tuple[Rows, Rows]]:
    """Cut equally many rows of two arrays into pairs of rows that are one run in both arrays."""
    one, other, pairs = list(source.runs[::-1]), list(target.runs[::-1]), []
    while one and other:
        a, b = one.pop(), other.pop()
        n = min(len(a), len(b))
        pairs.append((Rows(source.array, (a[:n],)), Rows(target.array, (b[:n],))))
        one += [a[n:]] * (len(a) > n)
        other += [b[n:]] * (len(b) > n)
    return pairs


def _rows_at(name: str, pieces: Iterable[tuple[int, Runs, Runs | None]]) -> Rows:
    """Return rows of an array: of each piece, with its first row and places, the wanted places."""
    runs: list[range] = []
    for offset, own, places in pieces:
        for begin, end in own:
            for a, b in ((begin, end),) if places is None else common(places, begin, end):
                first, last = offset + a - begin, offset + b - begin
                if runs and runs[-1].stop == first:
                    runs[-1] = range(runs[-1].start, last)
                else:
                    runs.append(range(first, last))
            offset += end - begin
    return Rows(name, tuple(runs))
