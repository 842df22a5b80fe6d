"""The executor of programs: each step is one function on the arrays of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from a2d_mpi.attention.device_state import DeviceState
from a2d_mpi.attention.tags import mpi_tag
from a2d_mpi.comm.channel import Channel
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.masks.intervals import Intervals
from a2d_mpi.schedules import steps
from a2d_mpi.schedules.program import Program, common_rows, index_of
from a2d_mpi.schedules.slices import ATTEND
from a2d_mpi.schedules.steps import KINDS, Rows, TokenArray

Channels = Mapping[str, Channel]  # by the names of the programs
Tensors = dict[str, Array]  # by name


class Options(NamedTuple):
    """Options of a call of this rank.

    Attributes
    ----------
    careful, any_delta : bool
        See `a2d_mpi.kernels.protocol.Kernel`.
    sink : (heads,) array or None
        Added to the results of attention, which then have the accumulation dtype.
    largest : (heads,) array or None
        Receives the largest logits.
    """

    careful: bool
    any_delta: bool
    sink: Array | None = None
    largest: np.ndarray | None = None

    def of_slice(self, number: int, slices: int) -> Options:
        """Return the options of one slice of the heads."""
        each = (x if x is None else x.reshape(slices, -1)[number] for x in self[2:])
        return Options(*self[:2], *each)


class CompiledPhase:
    """The programs of a phase on one rank, compiled when it is made.

    Parameters
    ----------
    programs : sequence of Program
        Programs, or parts of programs, in the order of execution, of
        `a2d_mpi.schedules.writing.write`.

    Attributes
    ----------
    channels : dict of str to tuple of int
        The ranks of each channel.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.channels = {name: x for p in programs for name, x in p.channels.items()}
        self._slices = 1 + max(p.slice for p in programs)
        executors: dict[tuple[int, int], Executor] = {}
        # Each part: executor, compiled steps, and whether its program begins and ends with it.
        self._parts: list[tuple[Executor, list[tuple], bool, bool]] = []
        compiled: dict[int, tuple] = {}  # slices have the same steps
        last = {(p.slice, p.stage): i for i, p in enumerate(programs)}
        for i, p in enumerate(programs):
            key = p.slice, p.stage
            if begins := key not in executors:
                executors[key] = Executor(p, self._slices)
            for step in p.steps:
                if id(step) not in compiled:
                    compiled[id(step)] = _COMPILED[type(step)](step, p)
            ready = [compiled[id(step)] for step in p.steps]
            self._parts.append((executors[key], ready, begins, last[key] == i))
        self._last, self._in_buffers = programs[-1].stage, bool(programs[-1].copied)
        self._config = programs[-1].group.problem.config

    def run(
        self, state: DeviceState, channels: Channels, given: Tensors, options: Options
    ) -> Tensors:
        """Run all programs.

        Parameters
        ----------
        state : DeviceState
        channels : Channels
        given : Tensors
            This rank's shard of the tensors that the programs read.
        options : Options

        Returns
        -------
        Tensors
            This rank's shard of the results, in new arrays of the caller's dtypes.
        """
        if len(self._parts) > 1:
            results = self._run_slices(state, channels, given, options)
        else:  # neither a head axis nor slices
            ((executor, ready, _, _),) = self._parts
            executor.begin(state, channels, given, options, {})
            executor.run(ready)
            results = executor.end()
        for name, x in results.items():
            dtype = self._config.dtype_of(name)
            if x.dtype != dtype or self._in_buffers:
                results[name] = state.device.empty(x.shape, dtype)  # (n, heads, headdim)
                with state.clocks.span("merge"):
                    state.device.put(results[name], x)
        return results

    def _run_slices(
        self, state: DeviceState, channels: Channels, given: Tensors, options: Options
    ) -> Tensors:
        """Run programs that take heads, attend and put heads, of all slices."""
        tensors: dict[int, Tensors] = {}  # of each slice
        whole: dict[str, Tensors] = {}  # arrays of results, to which all slices write
        for executor, ready, begins, ends in self._parts:
            i = executor.slice
            if begins:
                read = tensors.pop(i, given)
                new = whole if executor.stage == self._last else {}
                executor.begin(state, channels, read, options.of_slice(i, self._slices), new)
            executor.run(ready)
            if ends:
                tensors[i] = executor.end()
        return {name: x for of_slice in tensors.values() for name, x in of_slice.items()}


class Executor:
    """The memory and the messages of one program, for one slice of the heads.

    Arrays of a program are the caller's tensors, new results, or buffers of the plan.

    Parameters
    ----------
    program : Program
    slices : int
        Number of slices.
    """

    def __init__(self, program: Program, slices: int) -> None:
        self.slice, self.stage, self._slices = program.slice, program.stage, slices
        self._arrays, self._results = program.arrays, program.results
        # Sizes with all heads of the problem, and with the heads that this rank computes.
        self._whole, self._local = program.group.problem.config, program.group.config
        self._pending: list[list[Any]] = [[]] * program.messages  # requests of each message
        self._work: Workspace | None = None

    def begin(
        self,
        state: DeviceState,
        channels: Channels,
        given: Tensors,
        options: Options,
        new: dict[str, Tensors],
    ) -> None:
        """Begin a call with the caller's arrays; results are made in `new`, unless it has them."""
        self._state, self._channels, self._options = state, channels, options
        self._given, self._new = given, new
        self._sink = options.sink if self.stage == ATTEND else None
        if self._work is not state.work:
            self._work = state.work
            self._views: dict[Rows, list[Array]] = state.work.cache()
        for name, array in self._arrays.items():
            if array.role == "result" and name not in new:
                new[name] = self._result(array, wide=self._sink is not None)

    def run(self, ready: list[tuple]) -> None:
        """Run compiled steps."""
        for do, *operands in self._state.clocks.noted(ready):
            do(self, *operands)

    def end(self) -> Tensors:
        """End the call, drop the caller's arrays, and return the results by name."""
        results = {
            name: x
            for rows in self._results.values()
            for name, x in zip(KINDS[self._kind(rows)], self._tensors(rows))
        }
        if self._sink is not None:
            with self._state.clocks.span("merge"):
                self._state.device.add_sink(sink=self._sink, **results)
        self._given, self._new = {}, {}
        return results

    def _kind(self, rows: Rows) -> str:
        """Return the kind of rows, one of `KINDS`."""
        return self._arrays[rows.array].kind

    def _tensors(self, rows: Rows) -> list[Array]:
        """Return rows of each tensor of an array, (tokens, heads, ...); the rows are one run."""
        if rows in self._views:
            return self._views[rows]
        array = self._arrays[rows.array]
        if array.role == "buffer":
            views = self._buffers(array)
        else:
            by_name = self._given if array.role == "given" else self._new[rows.array]
            views = [by_name[x] for x in KINDS[array.kind]]
        (run,) = rows.runs or (range(0),)
        if len(run) < array.length:
            views = [x[run.start : run.stop] for x in views]
        if array.role == "buffer":
            self._views[rows] = views
        return views

    def _buffers(self, array: TokenArray) -> list[Array]:
        """Return all rows of each tensor of a buffer."""
        as_computed = array.as_computed and getattr(self._state.kernel, "rounds_partials", False)
        shapes = _shapes(array, self._local, () if as_computed else array.accumulated)
        work = self._state.work
        if array.parcel:
            return work.parcel((array.memory, 0), shapes)
        return [work.get((array.memory, i), *x) for i, x in enumerate(shapes)]

    def _travelling(self, rows: Rows) -> list[Array]:
        """Return the arrays that MPI sends for rows; of a parcel, all of its bytes."""
        tensors, array = self._tensors(rows), self._arrays[rows.array]
        if not array.parcel:
            return tensors
        nbytes = sum(x.nbytes for x in tensors)
        return [self._state.work.get((array.memory, 0), (nbytes,), np.uint8)]

    def _result(self, array: TokenArray, wide: bool) -> Tensors:
        """Make new arrays for results: (tokens, heads, headdim), of lse (tokens, heads).

        If `wide`, they have the accumulation dtype, whatever the program says.
        """
        config, names = self._whole if array.all_heads else self._local, KINDS[array.kind]
        tensors = _shapes(array, config, names if wide else array.accumulated)
        return {name: self._state.device.empty(*x) for name, x in zip(names, tensors)}

    def _post(self, message: steps.Message, peer: int) -> None:
        channel, rows = self._channels[message.channel], message.rows
        start = channel.isend if isinstance(message, steps.Send) else channel.irecv
        tag = mpi_tag(self._kind(rows), message.tag, message.turn, self.slice)
        self._pending[message.index] = start(self._travelling(rows), peer, tag)

    def _wait(self, step: steps.Wait) -> None:
        if requests := [x for index in step.messages for x in self._pending[index]]:
            self._channels[step.channel].wait(requests)

    def _clear(self, rows: Rows) -> None:
        for x in self._tensors(rows):
            self._state.device.zero(x)

    def _attend(self, step: steps.Attend, intervals: Intervals) -> None:
        tensors, kernel, options = self._tensors, self._state.kernel, self._options
        (q,) = tensors(step.queries)  # (queries, nheads, headdim)
        k, v = tensors(step.keys)  # (keys, nheads_kv, headdim)
        given = q, k, v, intervals, *tensors(step.target)
        self._state.blocks["forward"] += 1
        with self._state.clocks.span("compute"):
            kernel.forward(*given, careful=options.careful, largest=options.largest)

    def _differentiate(self, step: steps.Differentiate, intervals: Intervals) -> None:
        tensors, kernel, options = self._tensors, self._state.kernel, self._options
        dout, q, lse, delta = tensors(step.queries)  # q: (queries, nheads, headdim)
        k, v = tensors(step.keys)  # (keys, nheads_kv, headdim)
        given = dout, q, k, v, lse, delta, intervals, *tensors(step.dq), *tensors(step.dkv)
        careful, any_delta = options.careful, options.any_delta
        self._state.blocks["backward"] += 1
        with self._state.clocks.span("compute"):
            kernel.backward(*given, fresh=step.fresh, careful=careful, any_delta=any_delta)

    def _merge(self, parts: list[tuple[Rows, Rows, Rows]]) -> None:
        tensors = self._tensors
        with self._state.clocks.span("merge"):
            for source, target, compensation in parts:
                merged = *tensors(target), *tensors(compensation)
                self._state.device.merge(*merged, *tensors(source))

    def _pairs(self, parts: Iterable[tuple[Rows, Rows]]) -> Iterator[tuple[Array, Array]]:
        """Yield the tensors of sources and targets; what is done meanwhile is merging."""
        with self._state.clocks.span("merge"):
            for source, target in parts:
                yield from zip(self._tensors(source), self._tensors(target))

    def _put(self, parts: list[tuple[Rows, Rows]], add: bool) -> None:
        for x, y in self._pairs(parts):
            self._state.device.put(y, x, add)

    def _by_index(self, how: str, source: Rows, target: Rows, index_on: Callable) -> None:
        device = self._state.device
        move, index = getattr(device, how), index_on(device)
        for x, y in self._pairs([(source, target)]):
            move(y, x, index)

    def _code(self, how: str, parts: list[tuple[Rows, Rows]]) -> None:
        device = self._state.device
        for x, y in self._pairs(parts):
            if x.shape == y.shape and x.dtype == y.dtype:  # it travels as it is
                device.put(y, x)
            else:
                getattr(device, how)(y, x, self._local.wire)

    def _move_heads(self, step: steps.TakeHeads | steps.PutHeads, whole: Rows) -> None:
        """Take heads from rows of all heads, or put them there."""
        first = (step.head * self._slices + self.slice) * self._local.nheads
        tensors = self._tensors(step.source), self._tensors(step.target)
        with self._state.clocks.span("merge"):
            for name, x, y in zip(KINDS[self._kind(whole)], *map(_with_elements, tensors)):
                head = first * self._whole.shape(name)[0] // self._whole.nheads
                if whole is step.source:
                    self._state.device.take_heads(y, x, head)
                else:
                    self._state.device.put_heads(y, x, head, name in step.sums)


def _posted(step: steps.Message, program: Program) -> tuple:
    return Executor._post, step, program.channels[step.channel].index(step.peer)


def _merging(step: steps.Merge, program: Program) -> tuple:
    both = (common_rows(step.source, x) for x in (step.target, step.compensation))
    return Executor._merge, [(*pair, compensation) for pair, (_, compensation) in zip(*both)]


def _moved(step: steps.Copy | steps.Add, program: Program) -> tuple:
    """Move rows run by run; between an order by piece and an order by token, by index."""
    (source, target), add = step, isinstance(step, steps.Add)
    by_token, into_by_token = (program.arrays[x.array].by_token for x in step)
    if by_token == into_by_token:
        return Executor._put, common_rows(source, target), add
    index = np.empty(source.count, np.int64)
    if add:
        how, index[index_of(source)] = "add_at", index_of(target)
    elif by_token:
        how, index[:] = "take", index_of(source)
    elif target.count < program.arrays[target.array].length:
        how, index[:] = "put_at", index_of(target)
    else:
        how, index[index_of(target)] = "take", index_of(source)
    on = cache(lambda device: device.upload(index))  # once for each device
    return Executor._by_index, how, *(program.rows(x.array) for x in step), on


def _called(step: steps.KernelCall, program: Program) -> tuple:
    """Find the visible keys of a kernel call; refuse rows that a kernel cannot take."""
    for rows in (x for x in step if isinstance(x, Rows)):
        if len(rows.runs) > 1:
            raise ValueError(
                f"a kernel call takes one run of rows, got {len(rows.runs)} runs of {rows.array!r}"
            )
    queries, keys = program.tokens(step.queries), program.tokens(step.keys)
    if (keys[1:] < keys[:-1]).any():
        raise ValueError(
            f"a kernel call takes keys in the order of tokens, got rows of {step.keys.array!r} "
            "in another order"
        )
    do = Executor._attend if isinstance(step, steps.Attend) else Executor._differentiate
    return do, step, program.mask.intervals(queries, keys)


def _shapes(
    array: TokenArray, config: AttentionConfig, accumulated: tuple[str, ...]
) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Return the shape and dtype of each tensor of an array."""
    rows = (config.row(x, x in accumulated, array.wire) for x in KINDS[array.kind])
    return [((array.length, *shape), dtype) for shape, dtype in rows]


def _with_elements(tensors: list[Array]) -> list[Array]:
    """Return views of shape (tokens, heads, elements), also of lse and delta."""
    return [x if x.ndim == 3 else x.reshape(*x.shape, 1) for x in tensors]


# Functions that compile a step to a function of the executor with its operands.  They are plain
# functions, because bound methods would refer back to the executor.
_COMPILED: dict[type, Callable[[Any, Program], tuple]] = {
    steps.Send: _posted,
    steps.Receive: _posted,
    steps.Wait: lambda step, program: (Executor._wait, step),
    steps.Drain: lambda step, program: (Executor._wait, step),
    steps.Clear: lambda step, program: (Executor._clear, step.rows),
    steps.Attend: _called,
    steps.Differentiate: _called,
    steps.Merge: _merging,
    steps.Copy: _moved,
    steps.Add: _moved,
    steps.Encode: lambda step, program: (Executor._code, "encode", common_rows(*step)),
    steps.Decode: lambda step, program: (Executor._code, "decode", common_rows(*step)),
    steps.TakeHeads: lambda step, program: (Executor._move_heads, step, step.source),
    steps.PutHeads: lambda step, program: (Executor._move_heads, step, step.target),
}
