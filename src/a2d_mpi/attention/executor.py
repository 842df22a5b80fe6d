"""Executor of schedules: their messages, kernel calls and merges, on the arrays of a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from a2d_mpi.attention.arrays import Arrays
from a2d_mpi.attention.engine import Engine
from a2d_mpi.comm.channel import Channel
from a2d_mpi.core.masks import Mask
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.devices.protocol import Array
from a2d_mpi.schedules import write
from a2d_mpi.schedules.accounts import merged_at_once, merged_rows
from a2d_mpi.schedules.places import Places, own_cuts
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import Span, chunk_of
from a2d_mpi.schedules.steps import KINDS, Attend, Copy, Merge, Message, Rows, Wait, Zero

_TAGS = {kind: 4 * i for i, kind in enumerate(KINDS)}
_NEXT_TAG = 4 * len(KINDS)
_NEXT_CHUNK = 4 * _NEXT_TAG
_STRIDE = 2 * _NEXT_CHUNK
_TURNS = 32000 // _STRIDE  # MPI has 32767 tags at least


def executors(
    method: str,
    phase: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    overlap: bool,
) -> list[Executor]:
    """Executors of a logical rank in one phase, to be run one after the other.

    Parameters
    ----------
    method, phase, layout, problem, rank, overlap
        As for `a2d_mpi.schedules.write`.
    """
    splits: dict[bool, list[slice]] = {}
    found = write(method, phase, layout, problem, rank, overlap, cuts=own_cuts(splits))
    config, mask = problem.config, problem.mask
    return [
        Executor(x, Arrays(x, layout, config, Places(x, splits)), x.mask or mask) for x in found
    ]


class Executor:
    """One schedule of one rank, compiled for its mask when it is made.

    Parameters
    ----------
    schedule : Schedule
    arrays : Arrays
    mask : Mask
    """

    def __init__(self, schedule: Schedule, arrays: Arrays, mask: Mask) -> None:
        self.schedule, self._arrays, self._mask = schedule, arrays, mask
        schedule.cuts = None  # it may refer back to the schedule
        self._merged = merged_rows(schedule)
        self._program = self._compiled()

    @property
    def in_buffers(self) -> bool:
        """True if results are in buffers of the plan."""
        arrays = self.schedule.arrays
        return any(arrays[x.array].role == "buffer" for x in self.schedule.results.values())

    def area(self) -> int:
        """Visible pairs that this rank computes for each head of its context group."""
        tokens = self._arrays.tokens
        return sum(
            self._mask.area(tokens(x.queries), np.sort(tokens(x.keys)))
            for x in self.schedule.steps
            if isinstance(x, Attend)
        )

    def run(
        self,
        engine: Engine,
        channels: Mapping[str, Channel],
        given: Mapping[str, Array],
        wide: bool = False,
    ) -> dict[str, Array]:
        """Run all steps.

        Parameters
        ----------
        engine : Engine
        channels : mapping of str to Channel
            By the names of the schedule.
        given : mapping of str to arrays
            This rank's shard of the tensors that the schedule reads.
        wide : bool
            Results have the dtype of the computation, whatever the schedule says.

        Returns
        -------
        dict of str to arrays
            This rank's shard of the results.
        """
        self._engine, self._channels = engine, channels
        self._arrays.begin(engine, given, wide)
        self._pending: dict[Message, list[Any]] = {}
        for rows in self._merged:
            engine.device.zero(self._arrays.compensation(rows))
        for do, *operands in self._program:
            do(self, *operands)
        for name in self.schedule.channels:
            sent = [r for m, rs in self._pending.items() if m.channel == name for r in rs]
            if sent:
                channels[name].wait(sent)
        self._pending = {}
        return self._arrays.end()

    def free(self) -> None:
        """Forget the buffers of the plan."""
        self._arrays.free()

    def _compiled(self) -> list[tuple]:
        """Steps as (function, operands); bound methods would refer back to the executor."""
        program: list[tuple] = []
        sent: Counter[tuple] = Counter()  # messages of the same kind to or from the same peer
        arrays, channels = self._arrays, self.schedule.channels
        merges = iter(merged_at_once(self.schedule))
        folds = {name for name in arrays.orders if arrays.kind(name) == "dkv"}
        for step in self.schedule.steps:
            if isinstance(step, Message | Merge) and step.rows.array in folds:
                # Gradients of several owners are in the order of tokens: back to that of owners.
                folds.remove(step.rows.array)
                program.append((Executor._fold, step.rows.array))
            if isinstance(step, Message):
                peer = channels[step.channel].index(step.peer)
                tag = _tag(self.schedule, step)
                way = step.sent, step.channel, peer, tag
                # A transport may send the later of two first, so that they need tags.
                program.append((Executor._post, step, peer, tag + sent[way] % _TURNS * _STRIDE))
                sent[way] += 1
            elif isinstance(step, Attend):
                found = arrays.tokens(step.queries), arrays.tokens(step.keys)
                intervals = self._mask.intervals(*found)
                hidden = not any((end > begin).any() for begin, end in intervals)
                if step.keys_into is not None:
                    if step.fresh or not hidden:
                        program += self._by_run(step, intervals)
                elif (merged := next(merges)) and hidden:
                    program.append((Executor._reserve, step))
                else:
                    program.append((Executor._attend, step, intervals, merged))
            elif isinstance(step, Copy | Merge) and (mover := self._mover(step)):
                program.append(mover)
            elif isinstance(step, Merge):
                is_sum = arrays.kind(step.to.array) != "out"
                program.append((Executor._add if is_sum else Executor._merge, step.rows, step.to))
            else:
                do = {Wait: Executor._wait, Copy: Executor._copy, Zero: Executor._zero}[type(step)]
                program.append((do, step))
        return program

    def _by_run(self, step: Attend, intervals: tuple) -> list[tuple]:
        """Backward calls: one, or one a run of keys that lie side by side in both arrays."""
        call, found = Executor._attend_backward, []
        for a, b, *where in self._arrays.places.common_runs(step.keys, step.keys_into):
            part = tuple(
                (np.clip(x - a, 0, b - a), np.clip(y - a, 0, b - a)) for x, y in intervals
            )
            found.append((call, step, part, where))
        return found or [(call, step, intervals, None)]

    def _post(self, message: Message, peer: int, tag: int) -> None:
        channel = self._channels[message.channel]
        start = channel.isend if message.sent else channel.irecv
        self._pending[message] = start(self._arrays.travelling(message.rows), peer, tag)

    def _wait(self, step: Wait) -> None:
        requests = [r for message in step.messages for r in self._pending.pop(message)]
        if requests:
            self._channels[step.messages[0].channel].wait(requests)

    def _copy(self, step: Copy) -> None:
        for to, x in zip(self._arrays.tensors(step.to), self._arrays.tensors(step.rows)):
            self._engine.device.put(to, x)

    def _mover(self, step: Copy | Merge) -> tuple | None:
        """The copy of some heads, or of tokens that do not follow each other; else None."""
        arrays, to = self._arrays, self.schedule.arrays[step.to.array]
        names, ends = KINDS[to.kind], (step.rows, step.to)
        if (heads := step.rows.heads) is not None:
            return Executor._take_heads, *ends, [arrays.first_head(x, heads) for x in names]
        if (heads := step.to.heads) is not None:
            firsts = [arrays.first_head(x, heads) for x in names]
            sums = [isinstance(step, Merge) and x in to.wide for x in names]
            return Executor._put_heads, *ends, firsts, sums
        if (places := arrays.reordered(step)) is None:
            return None
        return Executor._reorder, *ends, "put_at" if to.by_token else "take", places

    def _take_heads(self, rows: Rows, to: Rows, firsts: list[int]) -> None:
        with self._engine.clock("merge"):
            tensors = self._arrays.tensors(rows), self._arrays.tensors(to)
            for x, y, first in zip(*tensors, firsts):
                self._engine.device.take_heads(_three(y), _three(x), first)

    def _put_heads(self, rows: Rows, to: Rows, firsts: list[int], sums: list[bool]) -> None:
        with self._engine.clock("merge"):
            tensors = self._arrays.tensors(rows), self._arrays.tensors(to)
            for x, y, first, add in zip(*tensors, firsts, sums):
                self._engine.device.put_heads(_three(y), _three(x), first, add)

    def _reorder(self, rows: Rows, to: Rows, how: str, places: np.ndarray) -> None:
        """Copy to places, or from them; `how`: the device's "put_at" or "take"."""
        move = getattr(self._engine.device, how)
        with self._engine.clock("merge"):
            order = self._engine.upload(places)
            for x, y in zip(self._arrays.tensors(rows), self._arrays.tensors(to)):
                move(y, x, order)

    def _zero(self, step: Zero) -> None:
        for x in self._arrays.tensors(step.rows) + self._arrays.sorted(step.rows.array):
            self._engine.device.zero(x)

    def _reserve(self, step: Attend) -> None:
        """Leave a hidden block out; what a plan keeps does not depend on which ones are hidden."""
        self._arrays.own_partials(step.into)

    def _attend(self, step: Attend, intervals: tuple, merges: bool) -> None:
        arrays, engine, into = self._arrays, self._engine, self._arrays.tensors(step.into)
        target = arrays.own_partials(step.into) if merges else into  # partial out and lse
        q = arrays.tensors(step.queries)[0]  # (queries, nheads, headdim)
        k, v = arrays.keys(step.keys)  # (keys, nheads_kv, headdim)
        with engine.clock("compute"):
            engine.kernel.forward(q, k, v, intervals, *target)
        if merges:
            with engine.clock("merge"):
                engine.device.merge(*into, arrays.compensation(step.into), *target)

    def _attend_backward(self, step: Attend, intervals: tuple, runs: list[slice] | None) -> None:
        """`runs`: places of the keys and of their gradients, if these are not all of the rows."""
        arrays, kernel = self._arrays, self._engine.kernel
        dout, q, lse, delta = arrays.tensors(step.queries)  # q: (queries, nheads, headdim)
        if runs is None:
            k, v = arrays.keys(step.keys)  # (keys, nheads_kv, headdim)
            dkv = arrays.keys(step.keys_into)
        else:
            (k, v), dkv = (
                [x[run] for x in arrays.whole(rows)]
                for rows, run in zip((step.keys, step.keys_into), runs)
            )
        gradients = *arrays.tensors(step.into), *dkv  # as q, k, v
        with self._engine.clock("compute"):
            kernel.backward(dout, q, k, v, lse, delta, intervals, *gradients, fresh=step.fresh)

    def _merge(self, rows: Rows, to: Rows) -> None:
        arrays, first = self._arrays, 0
        given = arrays.tensors(rows)
        with self._engine.clock("merge"):
            for held, rest in zip(arrays.runs(to), arrays.compensations(to)):
                last = first + len(rest)
                self._engine.device.merge(*held, rest, *(x[first:last] for x in given))
                first = last

    def _add(self, rows: Rows, to: Rows) -> None:
        given, first = self._arrays.tensors(rows), 0
        with self._engine.clock("merge"):
            for held in self._arrays.runs(to):
                last = first + len(held[0])
                for x, contribution in zip(held, given):
                    self._engine.device.put(x, contribution[first:last], add=True)
                first = last

    def _fold(self, name: str) -> None:
        with self._engine.clock("merge"):
            order = self._engine.upload(self._arrays.orders[name])
            for x, x_sorted in zip(self._arrays.tensors(Rows(name)), self._arrays.sorted(name)):
                self._engine.device.add_at(x, x_sorted, order)


def _three(x: Array) -> Array:
    """A view as (tokens, heads, elements)."""
    return x if x.ndim == 3 else x.reshape(*x.shape, 1)


def _tag(schedule: Schedule, message: Message) -> int:
    """Tag of the first tensor: chunks, and rows of several owners, may overtake each other."""
    rows, place = message.rows, 0
    if isinstance(rows.part, Span):
        place = schedule.channels[message.channel].index(rows.owner)
    elif (part := chunk_of(rows.part)) is not None:
        place = part[0]
    tag = _TAGS[schedule.arrays[rows.array].kind] + _NEXT_TAG * message.tag
    return tag + _NEXT_CHUNK * place
