"""Arrays of a schedule: the caller's tensors, new results, and buffers of the plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from a2d_mpi.attention.engine import Engine
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import Layout
from a2d_mpi.devices.protocol import Array
from a2d_mpi.schedules.accounts import packed
from a2d_mpi.schedules.places import Places, sorted_arrays
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.steps import KINDS, Copy, Merge, Rows
from a2d_mpi.schedules.steps import Array as Described


class Arrays:
    """The arrays of one schedule of one rank.

    Parameters
    ----------
    schedule : Schedule
    layout : Layout
    config : AttentionConfig
        With all heads.
    places : Places
    """

    def __init__(
        self, schedule: Schedule, layout: Layout, config: AttentionConfig, places: Places
    ) -> None:
        self._schedule, self._described = schedule, schedule.arrays
        self._config, self._group = config, config.context_group(layout.heads)
        self._heads, self.places = layout.heads, places
        self.orders = {  # of arrays that a kernel needs in the order of tokens: (tokens,) int64
            name: order
            for name in sorted_arrays(schedule)
            if (order := places.order(name)) is not None
        }
        self._packed = {x: number for number, x in enumerate(packed(schedule, places))}
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
        self._copied: set[Rows] = set()

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
        """Rows of each tensor of an array, which lie side by side."""
        if rows in self._views:
            return self._views[rows]
        where = self.slice(rows)
        found = self.whole(rows)
        if where != slice(None):
            found = [x[where] for x in found]
        if self._described[rows.array].role == "buffer":
            self._views[rows] = found
        return found

    def runs(self, rows: Rows) -> list[list[Array]]:
        """Rows of each tensor of an array, run by run of those that lie side by side."""
        return [[x[where] for x in self.whole(rows)] for where in self.places.slices(rows)]

    def whole(self, rows: Rows) -> list[Array]:
        """All rows of each tensor of an array."""
        array = self._described[rows.array]
        names = KINDS[array.kind]
        if array.role != "buffer":
            known = self._given if array.role == "given" else self._results[rows.array]
            return [known[x] for x in names]
        if array.packed:
            return self._parcel(rows)[1]
        tokens, room = self.places.total(rows), array.room or rows.array
        # Each is (tokens of all owners, heads, headdim), or (.., heads) for statistics.
        return [self._buffer(room, x, tokens, x in array.wide) for x in names]

    def travelling(self, rows: Rows) -> list[Array]:
        """Rows in the messages that carry them: one for all tensors of a packed array.

        Rows that are sent and do not lie side by side are copied first.
        """
        if rows in self._packed:
            return self._side_by_side(rows)
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
        tokens = self.places.total(Rows(name))
        return [
            self._buffer((name, "sorted"), x, tokens, x in array.wide) for x in KINDS[array.kind]
        ]

    def own_partials(self, rows: Rows) -> list[Array]:
        """Buffers of a partial out and lse for some of this rank's rows."""
        n, where = self._schedule.sizes.counts(False)[self._schedule.rank], self.slice(rows)
        wide = not getattr(self._engine.kernel, "rounds_partials", False)
        return [  # (rows, nheads, headdim), (rows, nheads)
            self._buffer("own", x, n, wide)[where] for x in KINDS["out"]
        ]

    def compensation(self, rows: Rows) -> Array:
        """Rounding lost by the merges of the lse of rows: (rows, nheads)."""
        if rows not in self._rests:
            self._rests[rows] = self._rest(rows)[self.slice(rows)]
        return self._rests[rows]

    def compensations(self, rows: Rows) -> list[Array]:
        """The same, run by run."""
        return [self._rest(rows)[where] for where in self.places.slices(rows)]

    def _rest(self, rows: Rows) -> Array:
        tokens = self.places.total(rows)
        return self._buffer((rows.array, "rest"), "lse", tokens, wide=True)

    def tokens(self, rows: Rows) -> np.ndarray:
        """Global indices of rows; those of keys of several owners in the order of tokens."""
        found = self.places.tokens(rows)
        return np.sort(found) if rows.owner is None and rows.array in self.orders else found

    def reordered(self, step: Copy | Merge) -> np.ndarray | None:
        """Places of an owner's rows in an array by token; None if neither array is by token."""
        for rows in (step.to, step.rows):
            array = self._described[rows.array]
            if array.by_token and rows.owner is not None:
                shards = self._schedule.sizes.shards(array.of_keys)
                tokens = np.sort(np.concatenate([shards.tokens(p) for p in array.owners]))
                return np.searchsorted(tokens, shards.tokens(rows.owner))
        return None

    def first_head(self, name: str, rank: int) -> int:
        """First head of a tensor among those that a rank of the head group computes."""
        first = rank % self._heads * self._group.nheads
        return first * self._config.shape(name)[0] // self._config.nheads

    def slice(self, rows: Rows) -> slice:
        """Place of rows that lie side by side in their array."""
        if self._described[rows.array].by_token:
            return slice(None)  # rows of one owner: see `reordered`
        if rows.owner is None:
            return self._within(rows)
        (found,) = self.places.slices(rows)
        return found

    def _within(self, rows: Rows) -> slice:
        """Place of the tokens of a span among those of all owners."""
        if rows.part is None:
            return slice(None)
        tokens = self.tokens(rows._replace(part=None))
        found = np.flatnonzero((tokens >= rows.part.begin) & (tokens < rows.part.end))
        assert len(found) == 0 or found[-1] - found[0] == len(found) - 1, "rows are scattered"
        return slice(found[0], found[-1] + 1) if len(found) else slice(0, 0)

    def _side_by_side(self, rows: Rows) -> list[Array]:
        """Copies of rows, (tokens, heads, headdim) each."""
        array, key = self._described[rows.array], ("packed", self._packed[rows])
        tokens, runs = self.places.count(rows), self.runs(rows)
        found = [self._buffer(key, x, tokens, x in array.wide) for x in KINDS[array.kind]]
        if rows in self._copied:
            return found  # on their way to another rank, too
        self._copied.add(rows)
        with self._engine.clock("merge"):
            first = 0
            for tensors in runs:
                last = first + len(tensors[0])
                for to, x in zip(found, tensors):
                    self._engine.device.put(to[first:last], x)
                first = last
        return found

    def _parcel(self, rows: Rows) -> tuple[Array, list[Array]]:
        """A packed array as bytes, and its tensors: (tokens, heads, headdim) each."""
        array, tokens = self._described[rows.array], self.places.total(rows)
        like = [
            ((tokens, *self._group.shape(x)), self._group.dtype_of(x, x in array.wide))
            for x in KINDS[array.kind]
        ]
        return self._engine.work.parcel((rows.array, "all"), like)

    def _new(self, array: Described, wide: bool) -> dict[str, Array]:
        """New arrays for results: (tokens, heads, headdim), of lse (tokens, heads)."""
        counts = self._schedule.sizes.counts(array.of_keys)
        tokens = sum(counts[p] for p in array.owners)  # results have whole shards
        config, empty = self._config if array.all_heads else self._group, self._engine.device.empty
        return {
            x: empty((tokens, *config.shape(x)), config.dtype_of(x, wide or x in array.wide))
            for x in KINDS[array.kind]
        }

    def _buffer(self, key: object, name: str, tokens: int, wide: bool) -> Array:
        """Buffer `key` of the plan for so many tokens of a tensor; `wide` as of `dtype_of`."""
        shape = tokens, *self._group.shape(name)
        return self._engine.work.get((key, name), shape, self._group.dtype_of(name, wide))
