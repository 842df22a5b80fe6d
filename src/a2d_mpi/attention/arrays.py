"""Arrays of a schedule: the caller's tensors, new results, and buffers of the plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from a2d_mpi.attention.engine import Engine
from a2d_mpi.core.chunks import chunks
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.sizes import Layout
from a2d_mpi.devices.protocol import Array
from a2d_mpi.schedules.accounts import sorted_arrays
from a2d_mpi.schedules.sizes import Span
from a2d_mpi.schedules.steps import FIRST, KINDS, Copy, Merge, Rows, Schedule
from a2d_mpi.schedules.steps import Array as Described


class Arrays:
    """The arrays of one schedule of one rank.

    Parameters
    ----------
    schedule : Schedule
    layout : Layout
    config : AttentionConfig
        With all heads.
    shards : Distribution
        Of the ranks of the schedule.
    splits : mapping of bool to list of slices
        Slices of this rank's own queries (False) and keys (True) that are computed first and
        last, where the schedule has both.
    """

    def __init__(
        self,
        schedule: Schedule,
        layout: Layout,
        config: AttentionConfig,
        shards: Distribution,
        splits: Mapping[bool, list[slice]],
    ) -> None:
        self._schedule, self._described = schedule, schedule.arrays
        self._config, self._group = config, config.context_group(layout.heads)
        self._heads, self._shards, self._splits = layout.heads, shards, splits
        self._sizes, self._counts = schedule.sizes, schedule.sizes.counts
        self.orders = {  # of arrays that a kernel needs in the order of tokens: (tokens,) int64
            name: order
            for name in sorted_arrays(schedule)
            if (order := self._order(name)) is not None
        }
        self._slices: dict[Rows, slice] = {}
        self._views: dict[Rows, list[Array]] = {}
        self._parcels: dict[Rows, list[Array]] = {}
        self._rests: dict[Rows, Array] = {}
        self._version: object = None

    def begin(self, engine: Engine, given: Mapping[str, Array], wide: bool = False) -> None:
        """Begin a call with the caller's arrays and new results; `wide`: as of `dtype_of`."""
        self._engine, self._given = engine, given
        if self._version is not engine.work.version:  # buffers were made anew
            self._version = engine.work.version
            self.free()
        self._results = {
            name: self._new(x, wide) for name, x in self._described.items() if x.role == "result"
        }
        self._in_order: set[str] = set()

    def end(self) -> dict[str, Array]:
        """End the call, keep none of the caller's arrays, and return the results by name."""
        found = {
            x: y
            for rows in self._schedule.results.values()
            for x, y in zip(KINDS[self.kind(rows.array)], self.tensors(rows))
        }
        self._given, self._results = {}, {}
        return found

    def free(self) -> None:
        """Forget the buffers of the plan."""
        self._views, self._parcels, self._rests = {}, {}, {}

    def kind(self, name: str) -> str:
        """Kind of an array, one of `KINDS`."""
        return self._described[name].kind

    def tensors(self, rows: Rows) -> list[Array]:
        """Rows of each tensor of an array."""
        if rows in self._views:
            return self._views[rows]
        array = self._described[rows.array]
        names, where = KINDS[array.kind], self.slice(rows)
        if array.role != "buffer":
            known = self._given if array.role == "given" else self._results[rows.array]
            whole = [known[x] for x in names]
        elif array.packed:
            whole = self._parcel(rows)[1]
        else:
            tokens = self._count(rows)
            whole = [self._buffer(rows.array, x, tokens, x in array.wide) for x in names]
        # Each of `whole` is (tokens of all owners, heads, headdim), or (.., heads) for statistics.
        found = whole if where == slice(None) else [x[where] for x in whole]
        if array.role == "buffer":
            self._views[rows] = found
        return found

    def travelling(self, rows: Rows) -> list[Array]:
        """Rows in the messages that carry them: one for all tensors of a packed array."""
        if not self._described[rows.array].packed:
            return self.tensors(rows)
        if rows not in self._parcels:
            self._parcels[rows] = [self._parcel(rows)[0]]
        return self._parcels[rows]

    def keys(self, rows: Rows) -> list[Array]:
        """Rows of keys or of their gradients; those of several owners in the order of tokens."""
        name = rows.array
        if rows.owner is not None or name not in self.orders:
            return self.tensors(rows)
        where, found = self.slice(rows), self.sorted(name)
        if self.kind(name) == "kv" and name not in self._in_order:
            self._in_order.add(name)  # all have arrived: sorted once a call
            with self._engine.clock("merge"):
                order = self._engine.upload(self.orders[name])
                for to, x in zip(found, self.tensors(Rows(name))):
                    self._engine.device.take(to, x, order)
        return found if where == slice(None) else [x[where] for x in found]

    def sorted(self, name: str) -> list[Array]:
        """Second buffers of an array, in the order of tokens; empty if the first are in it."""
        array = self._described[name]
        if name not in self.orders:
            return []
        tokens = self._count(Rows(name))
        return [
            self._buffer((name, "sorted"), x, tokens, x in array.wide) for x in KINDS[array.kind]
        ]

    def own_partials(self, rows: Rows) -> list[Array]:
        """Buffers of a partial out and lse for some of this rank's rows."""
        n, where = self._counts[self._schedule.rank], self.slice(rows)
        return [  # (rows, nheads, headdim), (rows, nheads)
            self._buffer("own", x, n, wide=True)[where] for x in KINDS["out"]
        ]

    def compensation(self, rows: Rows) -> Array:
        """Rounding lost by the merges of the lse of rows: (rows, nheads)."""
        if rows not in self._rests:
            whole = self._buffer((rows.array, "rest"), "lse", self._count(rows), wide=True)
            self._rests[rows] = whole[self.slice(rows)]
        return self._rests[rows]

    def tokens(self, rows: Rows) -> np.ndarray:
        """Global indices of rows; those of keys of several owners in the order of tokens."""
        return self._ordered(rows)[self._find(rows)]

    def places(self, step: Copy | Merge) -> np.ndarray | None:
        """Places of an owner's rows in an array by token; None if neither array is by token."""
        for rows in (step.to, step.rows):
            array = self._described[rows.array]
            if array.by_token and rows.owner is not None:
                tokens = np.sort(np.concatenate([self._shards.tokens(p) for p in array.owners]))
                return np.searchsorted(tokens, self._shards.tokens(rows.owner))
        return None

    def first_head(self, name: str, rank: int) -> int:
        """First head of a tensor among those that a rank of the head group computes."""
        first = rank % self._heads * self._group.nheads
        return first * self._config.shape(name)[0] // self._config.nheads

    def slice(self, rows: Rows) -> slice:
        """Place of rows in their array."""
        if rows not in self._slices:
            self._slices[rows] = self._find(rows)
        return self._slices[rows]

    def _find(self, rows: Rows) -> slice:
        array = self._described[rows.array]
        if array.by_token:
            return slice(None)  # rows of one owner: see `places`
        if rows.owner is None:
            return self._within(rows)
        if rows.part is None and len(array.owners) < 2:
            return slice(None)
        first = 0
        for owner, span in array.pieces or [(rows.owner, None)]:
            whole = self._sizes.within(owner, span)
            if owner == rows.owner and (where := self._part(rows, whole, span)) is not None:
                return slice(first + where.start, first + where.stop)
            first += whole.stop - whole.start
        raise AssertionError(f"{rows} are in no array")

    def _part(self, rows: Rows, whole: slice, span: Span | None) -> slice | None:
        """Place of a part of an owner's rows in the piece of the array that has it, if it has."""
        n = whole.stop - whole.start
        if isinstance(rows.part, Span):
            if span is not None and not span.begin <= rows.part.begin <= rows.part.end <= span.end:
                return None
            where = self._sizes.within(rows.owner, rows.part)
            return slice(where.start - whole.start, where.stop - whole.start)
        if isinstance(rows.part, str):
            return self._splits[of_keys(self._schedule, rows)][rows.part != FIRST]
        return slice(0, n) if rows.part is None else chunks(n, rows.part[1])[rows.part[0]]

    def _within(self, rows: Rows) -> slice:
        """Place of the tokens of a span among those of all owners."""
        if rows.part is None:
            return slice(None)
        tokens = self._ordered(rows)
        found = np.flatnonzero((tokens >= rows.part.begin) & (tokens < rows.part.end))
        assert len(found) == 0 or found[-1] - found[0] == len(found) - 1, "rows are scattered"
        return slice(found[0], found[-1] + 1) if len(found) else slice(0, 0)

    def _ordered(self, rows: Rows) -> np.ndarray:
        """Global indices of all rows of an array, as a kernel that asks for these meets them."""
        whole = self._whole(rows)
        if rows.owner is None and rows.array in self.orders:
            return whole[self.orders[rows.array]]
        return whole

    def _whole(self, rows: Rows) -> np.ndarray:
        """Global indices of all rows of an array, as it lies in memory."""
        pieces = self._described[rows.array].pieces or [(rows.owner, None)]
        return np.concatenate(
            [self._shards.tokens(p)[self._sizes.within(p, x)] for p, x in pieces]
        )

    def _order(self, name: str) -> np.ndarray | None:
        order = np.argsort(self._whole(Rows(name)))
        return None if (np.diff(order) == 1).all() else order

    def _count(self, rows: Rows) -> int:
        pieces = self._described[rows.array].pieces or [(rows.owner, None)]
        found = (self._sizes.within(*piece) for piece in pieces)
        return sum(where.stop - where.start for where in found)

    def _parcel(self, rows: Rows) -> tuple[Array, list[Array]]:
        """A packed array as bytes, and its tensors: (tokens, heads, headdim) each."""
        array, tokens = self._described[rows.array], self._count(rows)
        like = [
            ((tokens, *self._group.shape(x)), self._group.dtype_of(x, x in array.wide))
            for x in KINDS[array.kind]
        ]
        return self._engine.work.parcel((rows.array, "all"), like)

    def _new(self, array: Described, wide: bool) -> dict[str, Array]:
        """New arrays for results: (tokens, heads, headdim), of lse (tokens, heads)."""
        tokens = sum(self._counts[p] for p in array.owners)  # results have whole shards
        config, empty = self._config if array.all_heads else self._group, self._engine.device.empty
        return {
            x: empty((tokens, *config.shape(x)), config.dtype_of(x, wide or x in array.wide))
            for x in KINDS[array.kind]
        }

    def _buffer(self, key: object, name: str, tokens: int, wide: bool) -> Array:
        """Buffer `key` of the plan for so many tokens of a tensor; `wide` as of `dtype_of`."""
        shape = tokens, *self._group.shape(name)
        return self._engine.work.get((key, name), shape, self._group.dtype_of(name, wide))


def of_keys(schedule: Schedule, rows: Rows) -> bool:
    """Tell whether rows are of keys or of their gradients."""
    return schedule.arrays[rows.array].kind in ("kv", "dkv")
