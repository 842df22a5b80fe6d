"""The arrays of a program, and the rows of them that hold given tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from a2d_mpi.masks.intervals import Runs, common, cut, size
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.progressions import concatenated, progressions, ranks_among
from a2d_mpi.schedules.steps import KINDS, KINDS_OF_KEYS, SUMS, Rows, TokenArray


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
        # Results of the methods below, which programs ask for many times.
        self._piece_offsets: dict[str, list[int]] = {}
        self._pieces_of: dict[str, dict[int, list[int]]] = {}
        self._twins: dict[str, str] = {}
        self._positions: dict[str, list[list[range]]] = {}
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
            options = {"room": name, **options}
            self.arrays[name] = TokenArray(kind, tuple(pieces), role, accumulated, **options)
        return name

    def own(self, name: str, kind: str, role: str = "buffer", **options: bool | str) -> Rows:
        """Declare an array of this rank's shard; return all its rows."""
        places = self.group.all_places(kind in KINDS_OF_KEYS, self.rank)
        return self.rows(self.array(name, kind, [(self.rank, places)], role, **options))

    def rows(
        self,
        name: str,
        owner: int | None = None,
        places: Runs | None = None,
        head: int | None = None,
    ) -> Rows:
        """Return rows of an array.

        Parameters
        ----------
        name : str
            Name of the array.
        owner : int, optional
            Only rows of this owner's tokens.  Default: all rows.
        places : Runs, optional
            Only rows of the tokens at these places of the owner's shard.  For an array by token
            they must be the places of one of its pieces.  Default: all places.
        head : int, optional
            As in `Rows`.
        """
        array = self.arrays[name]
        if owner is None:
            return Rows(name, (range(array.length),) if array.length else (), head)
        if array.by_token:
            positions_of = self._by_token(name)
            numbers = self._of_owner(name, owner)
            matching = (i for i in numbers if places in (None, array.pieces[i][1]))
            return Rows(name, tuple(run for i in matching for run in positions_of[i]), head)
        runs: list[range] = []
        for offset, held in self._held_at(name, owner):
            _place(runs, offset, held, places)
        return Rows(name, tuple(runs), head)

    def rows_within(self, name: str, begin: int, end: int) -> Rows:
        """Return the rows of the tokens in ``[begin, end)``, of all owners."""
        array = self.arrays[name]
        shards, runs = self.group.shards(array.of_keys), []
        if not array.by_token:
            for offset, (owner, held) in zip(self._offsets(name), array.pieces):
                _place(runs, offset, held, shards.places(owner, ((begin, end),)))
            return Rows(name, tuple(runs))
        tokens = self.tokens(self.rows(name))
        first, last = np.searchsorted(tokens, (begin, end)).tolist()
        return Rows(name, (range(first, last),) if first < last else ())

    def matching(self, name: str, rows: Rows) -> Rows:
        """Return the rows of the array `name` for the tokens of `rows`."""
        runs: list[range] = []
        for owner, wanted in self.pieces(rows):
            for offset, held in self._held_at(name, owner):
                _place(runs, offset, held, wanted)
        return Rows(name, tuple(runs))

    def pieces(self, rows: Rows) -> list[tuple[int, Runs]]:
        """Return the owners of rows and the places in their shards.

        The array of the rows must not be by token.
        """
        pieces, offsets = self.arrays[rows.array].pieces, self._offsets(rows.array)
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
            shards = self.group.shards(array.of_keys)
            pieces = array.pieces if rows.count == array.length else self.pieces(rows)
            runs = [r for owner, places in pieces for r in shards.at(owner, places)]
            self._token_runs[rows] = runs
        return self._token_runs[rows]

    def tokens(self, rows: Rows) -> np.ndarray:
        """Return the token of every row, (rows,) int64, in the order of the rows."""
        array = self.arrays[rows.array]
        if array.by_token:
            of_array = self.token_runs(Rows(rows.array, (range(array.length),)))
            return np.sort(concatenated(of_array))[positions(rows)]
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
        intervals = self.mask.intervals(self.tokens(queries), np.sort(self.tokens(keys)))
        return any((end > begin).any() for begin, end in intervals)

    def sorted_twin(self, name: str) -> str:
        """Declare an array with the same rows by token; return its name.

        If the rows of the array are in the order of tokens, return the array itself.
        """
        if name not in self._twins:
            array = self.arrays[name]
            self._twins[name] = name
            if not (array.by_token or self.in_order(array.of_keys, array.pieces)):
                options = {"accumulated": array.accumulated, "by_token": True}
                twin = self.array(f"{name} by token", array.kind, array.pieces, **options)
                self._twins[name] = twin
        return self._twins[name]

    def in_order(self, of_keys: bool, pieces: Iterable[tuple[int, Runs]]) -> bool:
        """Return True if the tokens of pieces, one piece after the other, are in order."""
        shards = self.group.shards(of_keys)
        runs = (r for owner, places in pieces for r in shards.at(owner, places))
        return all(a[-1] < b[0] for a, b in pairwise(runs))

    def _piecewise(self, name: str) -> Rows:
        """Return all rows of an array by token, in the order of its pieces."""
        return Rows(name, tuple(run for runs in self._by_token(name) for run in runs))

    def _by_token(self, name: str) -> list[list[range]]:
        """Return the positions of every piece in the memory of an array by token."""
        if name not in self._positions:
            array = self.arrays[name]
            shards = self.group.shards(array.of_keys)
            tokens = [shards.at(owner, places) for owner, places in array.pieces]
            self._positions[name] = ranks_among(tokens)
        return self._positions[name]

    def _offsets(self, name: str) -> list[int]:
        """Return the offsets of the pieces of an array, in rows; the last one is its length."""
        if name not in self._piece_offsets:
            sizes = (size(places) for _, places in self.arrays[name].pieces)
            self._piece_offsets[name] = list(accumulate(sizes, initial=0))
        return self._piece_offsets[name]

    def _of_owner(self, name: str, owner: int) -> Sequence[int]:
        """Return the numbers of the pieces of an array that belong to an owner."""
        if name not in self._pieces_of:
            index = self._pieces_of[name] = {}
            for i, (owned_by, _) in enumerate(self.arrays[name].pieces):
                index.setdefault(owned_by, []).append(i)
        return self._pieces_of[name].get(owner, ())

    def _held_at(self, name: str, owner: int) -> list[tuple[int, Runs]]:
        """Return the offsets of an owner's pieces in an array, and their places in the shard."""
        offsets, pieces = self._offsets(name), self.arrays[name].pieces
        return [(offsets[i], pieces[i][1]) for i in self._of_owner(name, owner)]


def positions(rows: Rows) -> np.ndarray:
    """Return the positions of rows in the memory of their array, (rows,) int64."""
    return concatenated(rows.runs)


def common_rows(source: Rows, target: Rows) -> list[tuple[Rows, Rows]]:
    """Cut equally many rows of two arrays into pairs of rows that are one run in both arrays."""
    one, other = source.runs, target.runs
    pairs, i, j, a, b = [], 0, 0, 0, 0  # a, b: number of rows of the runs i, j that are done
    while i < len(one) and j < len(other):
        n = min(len(one[i]) - a, len(other[j]) - b)
        runs = (one[i][a : a + n],), (other[j][b : b + n],)
        pairs.append((source._replace(runs=runs[0]), target._replace(runs=runs[1])))
        a, b = a + n, b + n
        if a == len(one[i]):
            i, a = i + 1, 0
        if b == len(other[j]):
            j, b = j + 1, 0
    return pairs


def _place(runs: list[range], offset: int, held: Runs, places: Runs | None) -> None:
    """Append the positions of `places` to `runs`; the places `held` begin at `offset`."""
    for begin, end in held:
        wanted = ((begin, end),) if places is None else common(places, begin, end)
        for a, b in wanted:
            first, last = offset + a - begin, offset + b - begin
            if runs and runs[-1].stop == first:
                runs[-1] = range(runs[-1].start, last)
            else:
                runs.append(range(first, last))
        offset += end - begin
