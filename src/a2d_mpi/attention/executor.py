"""Runs a schedule: its messages, kernel calls and merges, with the arrays of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from a2d_mpi.attention.engine import Engine
from a2d_mpi.comm.channel import Channel
from a2d_mpi.core.chunks import chunks, split_own_shard, splits_own_shard
from a2d_mpi.core.masks import Mask, keys_per_query, queries_per_key
from a2d_mpi.core.sizes import Layout, Problem
from a2d_mpi.devices.protocol import Array
from a2d_mpi.schedules import write
from a2d_mpi.schedules.accounts import WIDE, merged_at_once, sorted_arrays, tensor_shape
from a2d_mpi.schedules.steps import (
    FIRST,
    KINDS,
    Attend,
    Copy,
    Merge,
    Message,
    Rows,
    Schedule,
    Wait,
    Zero,
)

_TAGS = {kind: 4 * i for i, kind in enumerate(KINDS)}
_NEXT_UNIT = 4 * len(KINDS)


class Executor:
    """One phase of one rank of a context group.

    All that follows from the schedule and the mask is found out when it is made.

    Parameters
    ----------
    method, phase, layout, group, overlap
        As for `a2d_mpi.schedules.write`.
    me : int
        Rank in the context group.
    shards : callable
        Tokens of a rank of the group, (n,) int64.
    mask : Mask
    """

    def __init__(
        self,
        method: str,
        phase: str,
        layout: Layout,
        group: Problem,
        overlap: bool,
        me: int,
        shards: Callable[[int], np.ndarray],
        mask: Mask,
    ) -> None:
        self._group, self._shards, self._mask, self._me = group, shards, mask, me
        self._own: dict[str, list[slice]] = {}
        self.schedule = write(method, phase, layout, group, me, overlap, cuts=self._cut_own)
        self.schedule.cuts = None  # which refers back, too
        unsorted = {x for x in sorted_arrays(self.schedule) if self._order(x) is not None}
        self._orders = {name: self._order(name) for name in unsorted}
        self._program = self._compiled(phase == "backward")

    def area(self) -> int:
        """Visible pairs that this rank computes, for each head of the group."""
        return sum(
            self._mask.area(self._tokens(x.queries), np.sort(self._tokens(x.keys)))
            for x in self.schedule.steps
            if isinstance(x, Attend)
        )

    def run(
        self,
        engine: Engine,
        channels: Mapping[str, Channel],
        given: Mapping[str, Array],
        results: Mapping[str, Array],
    ) -> dict[str, Array]:
        """Do all steps.

        Parameters
        ----------
        engine : Engine
        channels : mapping of str to Channel
            By the names of the schedule.
        given : mapping of str to arrays
            This rank's shard of the tensors that the schedule reads.
        results : mapping of str to arrays
            New arrays for those tensors that it makes and that are not in buffers.

        Returns
        -------
        dict of str to arrays
            This rank's shard of the results.
        """
        self._engine, self._channels = engine, channels
        self._given, self._results = given, results
        self._pending: dict[Message, list[Any]] = {}
        self._in_order: set[str] = set()
        if "out" in self.schedule.results:
            engine.device.zero(self._rest(slice(None)))
        for do, *operands in self._program:
            do(self, *operands)
        for name, channel in channels.items():
            sent = [r for m, rs in self._pending.items() if m.channel == name for r in rs]
            if sent:
                channel.wait(sent)
        found = {
            x: y
            for kind, rows in self.schedule.results.items()
            for x, y in zip(KINDS[kind], self._tensors(rows))
        }
        # The caller's arrays are not kept.
        self._given, self._results, self._pending = {}, {}, {}
        return found

    def _compiled(self, backward: bool) -> list[tuple]:
        """The steps as functions, for methods would refer back, and what these are called with."""
        program: list[tuple] = []
        merges = iter(merged_at_once(self.schedule))
        folds = {name for name in self._orders if self._kind(name) == "dkv"}
        for step in self.schedule.steps:
            if isinstance(step, Message | Merge) and step.rows.array in folds:
                # Whole gradients are in the order of tokens; owners get theirs.
                folds.remove(step.rows.array)
                program.append((Executor._fold, step.rows.array))
            if isinstance(step, Message):
                channel = self.schedule.channels[step.channel]
                program.append((Executor._post, step, channel.index(step.peer)))
            elif isinstance(step, Attend):
                intervals = self._mask.intervals(
                    self._tokens(step.queries), self._tokens(step.keys, self._keys_order(step))
                )
                if backward:
                    program.append((Executor._attend_backward, step, intervals))
                else:
                    program.append((Executor._attend, step, intervals, next(merges)))
            elif isinstance(step, Merge):
                program.append(
                    (Executor._add if backward else Executor._merge, step.rows, step.to)
                )
            else:
                do = {Wait: Executor._wait, Copy: Executor._copy, Zero: Executor._zero}[type(step)]
                program.append((do, step))
        return program

    def _post(self, message: Message, peer: int) -> None:
        rows, channel = message.rows, self._channels[message.channel]
        tag = _TAGS[self._kind(rows.array)]
        if rows.part is not None:  # units may overtake each other
            tag += _NEXT_UNIT * rows.part[0]
        start = channel.isend if message.sent else channel.irecv
        self._pending[message] = start(self._tensors(rows), peer, tag)

    def _wait(self, step: Wait) -> None:
        requests = [r for message in step.messages for r in self._pending.pop(message)]
        if requests:
            self._channels[step.messages[0].channel].wait(requests)

    def _copy(self, step: Copy) -> None:
        for to, x in zip(self._tensors(step.to), self._tensors(step.rows)):
            self._engine.device.put(to, x)

    def _zero(self, step: Zero) -> None:
        name = step.rows.array
        for x in self._tensors(step.rows) + (self._sorted(name) if name in self._orders else []):
            self._engine.device.zero(x)

    def _attend(self, step: Attend, intervals: tuple, merges: bool) -> None:
        engine, into = self._engine, self._tensors(step.into)
        target = into
        if merges:
            own = self._slice(step.into)
            n = self._group.counts[self._me]
            target = [self._buffer("own", x, n, wide=True)[own] for x in KINDS["out"]]
        q, (k, v) = self._tensors(step.queries)[0], self._keys(step.keys)
        with engine.clock("compute"):
            engine.kernel.forward(q, k, v, intervals, *target)
        if merges:
            with engine.clock("merge"):
                engine.device.merge(*into, self._rest(own), *target)

    def _attend_backward(self, step: Attend, intervals: tuple) -> None:
        dout, q, lse, delta = self._tensors(step.queries)
        k, v = self._keys(step.keys)
        gradients = *self._tensors(step.into), *self._keys(step.keys_into)
        with self._engine.clock("compute"):
            self._engine.kernel.backward(dout, q, k, v, lse, delta, intervals, *gradients)

    def _merge(self, rows: Rows, to: Rows) -> None:
        with self._engine.clock("merge"):
            self._engine.device.merge(
                *self._tensors(to), self._rest(self._slice(to)), *self._tensors(rows)
            )

    def _add(self, rows: Rows, to: Rows) -> None:
        with self._engine.clock("merge"):
            for x, contribution in zip(self._tensors(to), self._tensors(rows)):
                self._engine.device.put(x, contribution, add=True)

    def _fold(self, name: str) -> None:
        with self._engine.clock("merge"):
            order = self._engine.upload(self._orders[name])
            for x, x_sorted in zip(self._tensors(Rows(name)), self._sorted(name)):
                self._engine.device.add_at(x, x_sorted, order)

    def _tensors(self, rows: Rows) -> list[Array]:
        """Rows of each tensor of an array."""
        array = self.schedule.arrays[rows.array]
        names = KINDS[array.kind]
        if array.role == "buffer":
            owners = array.owners or (rows.owner,)
            tokens = sum(self._group.counts[p] for p in owners)
            whole = [self._buffer(rows.array, x, tokens) for x in names]
        else:
            known = self._given if array.role == "given" else self._results
            whole = [known[x] for x in names]
        where = self._slice(rows)
        return whole if where == slice(None) else [x[where] for x in whole]

    def _keys(self, rows: Rows) -> list[Array]:
        """Keys, or their gradients; those of several owners in the order of tokens."""
        name = rows.array
        if rows.owner is not None or name not in self._orders:
            return self._tensors(rows)
        found = self._sorted(name)
        if self._kind(name) == "kv" and name not in self._in_order:
            self._in_order.add(name)  # they have come, and are sorted once
            with self._engine.clock("merge"):
                order = self._engine.upload(self._orders[name])
                for to, x in zip(found, self._tensors(rows)):
                    self._engine.device.take(to, x, order)
        return found

    def _sorted(self, name: str) -> list[Array]:
        array = self.schedule.arrays[name]
        tokens = sum(self._group.counts[p] for p in array.owners)
        return [self._buffer((name, "sorted"), x, tokens) for x in KINDS[array.kind]]

    def _rest(self, rows: slice) -> Array:
        return self._buffer("rest", "lse", self._group.counts[self._me])[rows]

    def _buffer(self, key: object, name: str, tokens: int, wide: bool = False) -> Array:
        """The plan's buffer `key` for tokens of a tensor: as it is sent, or is computed."""
        dtype = self._engine.dtypes[wide or name in WIDE]
        shape = (tokens, *tensor_shape(self._group, name))
        return self._engine.work.get((key, name), shape, dtype)

    def _kind(self, name: str) -> str:
        return self.schedule.arrays[name].kind

    def _slice(self, rows: Rows) -> slice:
        """Where rows lie in their array."""
        owners, counts = self.schedule.arrays[rows.array].owners, self._group.counts
        if rows.owner is None:
            return slice(None)
        first, n = 0, counts[rows.owner]
        if owners:
            first = sum(counts[p] for p in owners[: owners.index(rows.owner)])
        if isinstance(rows.part, str):
            part = self._own[self._side(rows.array)][rows.part != FIRST]
        elif rows.part is not None:
            part = chunks(n, rows.part[1])[rows.part[0]]
        else:
            return slice(None) if len(owners) < 2 else slice(first, first + n)
        return slice(first + part.start, first + part.stop)

    def _side(self, name: str) -> str:
        return "kv" if self._kind(name) in ("kv", "dkv") else "q"

    def _tokens(self, rows: Rows, order: np.ndarray | None = None) -> np.ndarray:
        """Global indices of rows."""
        owners = self.schedule.arrays[rows.array].owners or (rows.owner,)
        tokens = np.concatenate([self._shards(p) for p in owners])
        return tokens[self._slice(rows)] if order is None else tokens[order]

    def _order(self, name: str) -> np.ndarray | None:
        """What sorts the tokens of an array; None if they are."""
        order = np.argsort(self._tokens(Rows(name)))
        return None if (np.diff(order) == 1).all() else order

    def _keys_order(self, step: Attend) -> np.ndarray | None:
        return self._orders.get(step.keys.array) if step.keys.owner is None else None

    def _cut_own(self, schedule: Schedule, mine: Rows, others: Rows, ranks: int) -> bool:
        """Cut this rank's own rows by the pairs that they make with the others."""
        self.schedule = schedule
        if not splits_own_shard(self._group.counts[self._me], ranks):
            return False
        tokens = np.sort(self._tokens(others)), self._shards(self._me)
        if self._side(mine.array) == "q":
            areas = keys_per_query(self._mask.intervals(tokens[1], tokens[0]))
        else:
            intervals = self._mask.intervals(self._tokens(others), tokens[1])
            areas = queries_per_key(intervals, len(tokens[1]))
        self._own[self._side(mine.array)] = parts = split_own_shard(areas, ranks)
        return len(parts) > 1
