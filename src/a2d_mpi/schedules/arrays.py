"""The arrays of a program, and the rows of them that hold given tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from a2d_mpi.masks.intervals import Intervals, Runs, common, cut
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.masks.stairs import intervals_of
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.steps import KINDS, KINDS_OF_KEYS, SUMS, Rows, TokenArray
from a2d_mpi.sharding.progressions import concatenated, progressions, ranks_among
from a2d_mpi.sharding.visibility import sees


class ProgramArrays:
    """The arrays that a program has declared, and the places of tokens in them.

    Parameters
    ----------
    rank : int
        Rank in the group.
    group : Group

    Attributes
    ----------
    arrays : dict of str to TokenArray
    mask : Mask
        Mask of the group's problem.
    """

    def __init__(self, rank: int, group: Group) -> None:
        self.rank, self.group, self.mask = rank, group, group.problem.mask
        self.arrays: dict[str, TokenArray] = {}
        self._lengths = [group.distribution(of_keys).seqlen for of_keys in (False, True)]
        # Results of the methods below, which programs ask for many times.
        self._by_token: dict[str, list[list[range]]] = {}
        self._token_runs: dict[Rows, list[range]] = {}
        self._extremes: dict[Rows, tuple[int, int]] = {}

    def array(
        self,
        name: str,
        kind: str,
        pieces: Iterable[tuple[int, Runs]],
        role: str = "buffer",
        accumulated: tuple[str, ...] | None = None,
        **options: bool | str,
    ) -> str:
        """Declare an array, see `a2d_mpi.schedules.steps.TokenArray`; return its name.

        By default all tensors of results have the accumulation dtype.
        """
        if name not in self.arrays:
            if accumulated is None:
                accumulated = KINDS[kind] if role == "result" else SUMS
            options = {"memory": name, **options}
            self.arrays[name] = TokenArray(kind, tuple(pieces), role, accumulated, **options)
        return name

    def array_for(self, name: str, rows: Rows, **options: object) -> Rows:
        """Declare an array of the same kind for the tokens of rows; return all its rows."""
        kind = self.arrays[rows.array].kind
        return self.rows(self.array(name, kind, self.pieces(rows), **options))

    def own(self, name: str, kind: str, role: str = "buffer", **options: bool | str) -> Rows:
        """Declare an array of this rank's shard; return all its rows."""
        places = self.group.all_places(kind in KINDS_OF_KEYS, self.rank)
        return self.rows(self.array(name, kind, [(self.rank, places)], role, **options))

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
            return _rows_at(name, ((i, held, owners.places(x, wanted)) for i, (x, held) in pieces))
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
        return sees(self.mask, *self._lengths, *runs)

    def intervals(self, queries: np.ndarray, keys: np.ndarray) -> Intervals:
        """Return the visible keys of tokens, see `a2d_mpi.masks.stairs.intervals_of`."""
        return intervals_of(self.mask, *self._lengths, queries, keys)

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


def index_of(rows: Rows) -> np.ndarray:
    """Return the places of rows in the memory of their array, (rows,) int64."""
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
    for offset, held, places in pieces:
        for begin, end in held:
            for a, b in ((begin, end),) if places is None else common(places, begin, end):
                first, last = offset + a - begin, offset + b - begin
                if runs and runs[-1].stop == first:
                    runs[-1] = range(runs[-1].start, last)
                else:
                    runs.append(range(first, last))
            offset += end - begin
    return Rows(name, tuple(runs))
