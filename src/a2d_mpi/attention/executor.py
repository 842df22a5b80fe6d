"""The executor of programs: each step is one function on the arrays of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from a2d_mpi.attention.engine import Engine
from a2d_mpi.comm.channel import Channel
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Constant, Workspace
from a2d_mpi.masks.intervals import Intervals
from a2d_mpi.schedules import steps
from a2d_mpi.schedules.program import Program, common_rows, index_of
from a2d_mpi.schedules.slices import ALIVE, ATTEND
from a2d_mpi.schedules.steps import KINDS, Rows, TokenArray

_TENSORS = 4  # most tensors of a kind that is no parcel; each tensor has a tag of its own
_TAGS = {kind: _TENSORS * i for i, kind in enumerate(KINDS)}
_STRIDE = _TENSORS * len(KINDS)
_TURNS = 32000 // _STRIDE // ALIVE // 8 * 8  # MPI guarantees tags up to 32767


class Pipeline:
    """The programs of a phase on one rank, compiled when it is made.

    Parameters
    ----------
    programs : sequence of Program
        Programs, or parts of programs, in the order of execution: see `a2d_mpi.schedules.write`.

    Attributes
    ----------
    channels : dict of str to tuple of int
        The ranks of each channel.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.channels = {name: x for p in programs for name, x in p.channels.items()}
        self.slices = 1 + max(p.slice for p in programs)
        executors: dict[tuple[int, int], Executor] = {}
        # Each part: executor, compiled steps, and whether its program begins and ends with it.
        self._parts: list[tuple[Executor, list[tuple], bool, bool]] = []
        compiled: dict[int, tuple] = {}  # slices have the same steps
        last = {(p.slice, p.number): i for i, p in enumerate(programs)}
        for i, p in enumerate(programs):
            key = p.slice, p.number
            if begins := key not in executors:
                executors[key] = Executor(p, self.slices)
            for step in p.steps:
                if id(step) not in compiled:
                    compiled[id(step)] = _COMPILED[type(step)](step, p)
            ready = [compiled[id(step)] for step in p.steps]
            self._parts.append((executors[key], ready, begins, last[key] == i))
        put = programs[-1]
        self._last, self._in_buffers = put.number, bool(put.copied)
        self._config = put.group.problem.config

    def run(
        self,
        engine: Engine,
        channels: Mapping[str, Channel],
        given: dict[str, Array],
        options: Sequence[Mapping[str, Any]],
        sink: Array | None = None,
    ) -> dict[str, Array]:
        """Run all programs.

        Parameters
        ----------
        engine : Engine
        channels : mapping of str to Channel
            By the names of the programs.
        given : dict of str to arrays
            This rank's shard of the tensors that the programs read.
        options : sequence of mapping
            Arguments of the kernel, such as `careful`, by slice.
        sink : (slices, heads) array, optional
            Added to the results of attention, which then have the accumulation dtype.

        Returns
        -------
        dict of str to arrays
            This rank's shard of the results, in new arrays of the caller's dtypes.
        """
        tensors: dict[int, dict[str, Array]] = {}  # of each slice
        whole: dict[str, dict[str, Array]] = {}  # arrays of results, to which all slices write
        keys: dict[str, Array] = {}  # of the KV heads that were taken last
        for program, ready, begins, ends in self._parts:
            slice_, attends = program.slice, program.number == ATTEND
            if begins:
                read = keys | tensors.pop(slice_, given)
                new = whole if program.number == self._last else {}
                rounds = sink is None or not attends
                program.begin(engine, channels, read, options[slice_], new, rounds)
            program.run(ready)
            if ends:
                tensors[slice_] = program.end()
                if attends and sink is not None:
                    with engine.clock("merge"):
                        engine.device.add_sink(sink=sink[slice_], **tensors[slice_])
                keys |= {x: y for x, y in tensors[slice_].items() if x in ("k", "v")}
        results = {name: x for of_slice in tensors.values() for name, x in of_slice.items()}
        for name, x in results.items():
            dtype = self._config.dtype_of(name)
            if x.dtype != dtype or self._in_buffers:
                results[name] = engine.device.empty(x.shape, dtype)  # (n, heads, headdim)
                with engine.clock("merge"):
                    engine.device.put(results[name], x)
        return results


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
        self._arrays, self._results = program.arrays, program.results
        self.slice, self.number, self._slices = program.slice, program.number, slices
        # Sizes with all heads of the problem, and with the heads that this rank computes.
        self._config, self._group = program.group.problem.config, program.group.config
        self._messages = program.messages
        self._tags = program.slice % ALIVE * _TURNS * _STRIDE  # first tag of this slice
        self._pending: list[list[Any]] = []  # requests of each message
        self._work: Workspace | None = None

    def begin(
        self,
        engine: Engine,
        channels: Mapping[str, Channel],
        given: dict[str, Array],
        options: Mapping[str, Any],
        new: dict[str, dict[str, Array]],
        rounds: bool,
    ) -> None:
        """Begin a call with the caller's arrays; `options` are arguments of the kernel.

        Results are made in `new`, unless it has them.  If `rounds` is false, they have the
        accumulation dtype, whatever the program says.
        """
        self._engine, self._channels, self._options = engine, channels, options
        self._given, self._new, self._pending = given, new, [[]] * self._messages
        if self._work is not engine.work:
            self._work = engine.work
            self._views: dict[Rows, list[Array]] = engine.work.cache()
            self._parcels: dict[str, tuple[Array, list[Array]]] = engine.work.cache()
        for name, array in self._arrays.items():
            if array.role == "result" and name not in new:
                new[name] = self._result(array, rounds)

    def run(self, ready: list[tuple]) -> None:
        """Run compiled steps."""
        for do, *operands in self._engine.clocked(ready):
            do(self, *operands)

    def end(self) -> dict[str, Array]:
        """End the call, drop the caller's arrays, and return the results by name."""
        results = {
            name: x
            for rows in self._results.values()
            for name, x in zip(KINDS[self._kind(rows)], self._tensors(rows))
        }
        self._given, self._new = {}, {}
        return results

    def _kind(self, rows: Rows) -> str:
        """Return the kind of rows, one of `KINDS`."""
        return self._arrays[rows.array].kind

    def _tensors(self, rows: Rows) -> list[Array]:
        """Return the given rows of each tensor of an array; the rows must be one run."""
        if rows in self._views:
            return self._views[rows]
        views, length = self._all_rows(rows.array), self._arrays[rows.array].length
        (run,) = rows.runs or (range(0),)
        if len(run) < length:
            views = [x[run.start : run.stop] for x in views]
        if self._arrays[rows.array].role == "buffer":
            self._views[rows] = views
        return views

    def _all_rows(self, name: str) -> list[Array]:
        """Return all rows of each tensor of an array: (tokens, heads, ...)."""
        array = self._arrays[name]
        names = KINDS[array.kind]
        if array.role != "buffer":
            by_name = self._given if array.role == "given" else self._new[name]
            return [by_name[x] for x in names]
        if array.parcel:
            return self._parcel(name)[1]
        tensors = self._shapes(array)
        return [self._engine.work.get((array.memory, i), *x) for i, x in enumerate(tensors)]

    def _travelling(self, rows: Rows) -> list[Array]:
        """Return the arrays that MPI sends for rows: one for all tensors of a parcel."""
        if not self._arrays[rows.array].parcel:
            return self._tensors(rows)
        return [self._parcel(rows.array)[0]]

    def _first_heads(self, rows: Rows, head: int) -> list[int]:
        """Return, for each tensor, the first head of this slice on rank `head` of its group."""
        first = (head * self._slices + self.slice) * self._group.nheads
        names = KINDS[self._kind(rows)]
        return [first * self._config.shape(x)[0] // self._config.nheads for x in names]

    def _shapes(self, array: TokenArray) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return the shape and dtype of each tensor of a buffer."""
        accumulated, config = array.accumulated, self._group
        if array.as_computed and getattr(self._engine.kernel, "rounds_partials", False):
            accumulated = ()
        tensors = []
        for name in KINDS[array.kind]:
            shape, dtype = config.row(name, name in accumulated, array.wire)
            tensors.append(((array.length, *shape), dtype))
        return tensors

    def _parcel(self, name: str) -> tuple[Array, list[Array]]:
        """Return a parcel as bytes, and its tensors, (tokens, heads, headdim) each."""
        if name not in self._parcels:
            array = self._arrays[name]
            tensors = self._shapes(array)
            self._parcels[name] = self._engine.work.parcel((array.memory, 0), tensors)
        return self._parcels[name]

    def _result(self, array: TokenArray, rounds: bool) -> dict[str, Array]:
        """Make new arrays for results: (tokens, heads, headdim), of lse (tokens, heads)."""
        config, empty = self._config if array.all_heads else self._group, self._engine.device.empty
        return {
            x: empty(
                (array.length, *config.shape(x)),
                config.dtype_of(x, not rounds or x in array.accumulated),
            )
            for x in KINDS[array.kind]
        }

    def _post(self, message: steps.Message, peer: int, tag: int) -> None:
        channel = self._channels[message.channel]
        start = channel.isend if isinstance(message, steps.Send) else channel.irecv
        tensors = self._travelling(message.rows)
        self._pending[message.index] = start(tensors, peer, self._tags + tag)

    def _wait(self, step: steps.Wait) -> None:
        requests = [x for index in step.messages for x in self._pending[index]]
        if requests:
            self._channels[step.channel].wait(requests)

    def _clear(self, rows: Rows) -> None:
        for x in self._tensors(rows):
            self._engine.device.zero(x)

    def _attend(self, step: steps.Attend, intervals: Intervals) -> None:
        tensors = self._tensors
        (q,) = tensors(step.queries)  # (queries, nheads, headdim)
        k, v = tensors(step.keys)  # (keys, nheads_kv, headdim)
        out, lse = tensors(step.target)
        with self._engine.clock("compute"):
            self._engine.kernel.forward(q, k, v, intervals, out, lse, **self._options)

    def _differentiate(self, step: steps.Differentiate, intervals: Intervals) -> None:
        tensors, kernel = self._tensors, self._engine.kernel
        dout, q, lse, delta = tensors(step.queries)  # q: (queries, nheads, headdim)
        k, v = tensors(step.keys)  # (keys, nheads_kv, headdim)
        gradients = *tensors(step.dq), *tensors(step.dkv)  # as q, k, v
        given = dout, q, k, v, lse, delta, intervals
        with self._engine.clock("compute"):
            kernel.backward(*given, *gradients, fresh=step.fresh, **self._options)

    def _merge(self, parts: list[tuple[Rows, Rows, Rows]]) -> None:
        tensors = self._tensors
        with self._engine.clock("merge"):
            for source, target, compensation in parts:
                held = *tensors(target), *tensors(compensation)
                self._engine.device.merge(*held, *tensors(source))

    def _put(self, parts: list[tuple[Rows, Rows]], add: bool) -> None:
        tensors = self._tensors
        with self._engine.clock("merge"):
            for source, target in parts:
                for x, y in zip(tensors(source), tensors(target)):
                    self._engine.device.put(y, x, add)

    def _by_index(self, how: str, source: str, target: str, index: Constant) -> None:
        move = getattr(self._engine.device, how)
        with self._engine.clock("merge"):
            for x, y in zip(self._all_rows(source), self._all_rows(target)):
                move(y, x, index.on(self._engine.device))

    def _code(self, how: str, parts: list[tuple[Rows, Rows]]) -> None:
        tensors, device = self._tensors, self._engine.device
        with self._engine.clock("merge"):
            for source, target in parts:
                for x, y in zip(tensors(source), tensors(target)):
                    if x.shape == y.shape and x.dtype == y.dtype:  # it travels as it is
                        device.put(y, x)
                    else:
                        getattr(device, how)(y, x, self._group.wire)

    def _take_heads(self, step: steps.TakeHeads) -> None:
        tensors, device = self._tensors, self._engine.device
        first = self._first_heads(step.source, step.head)
        with self._engine.clock("merge"):
            for x, y, head in zip(tensors(step.source), tensors(step.target), first):
                device.take_heads(_three(y), _three(x), head)

    def _put_heads(self, step: steps.PutHeads) -> None:
        device, names = self._engine.device, KINDS[self._kind(step.target)]
        tensors = self._tensors(step.source), self._tensors(step.target)
        first = self._first_heads(step.target, step.head)
        with self._engine.clock("merge"):
            for x, y, head, name in zip(*tensors, first, names):
                device.put_heads(_three(y), _three(x), head, name in step.sums)


def _posted(step: steps.Message, program: Program) -> tuple:
    peer = program.channels[step.channel].index(step.peer)
    return Executor._post, step, peer, _tag(step, program)


def _merging(step: steps.Merge, program: Program) -> tuple:
    compensation = (x for _, x in common_rows(step.source, step.compensation))
    pairs = common_rows(step.source, step.target)
    return Executor._merge, [(*both, x) for both, x in zip(pairs, compensation)]


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
    return Executor._by_index, how, source.array, target.array, Constant(index)


# Functions that compile a step to a function of the executor with its operands.  They are plain
# functions, because bound methods would refer back to the executor.
_COMPILED: dict[type, Callable[[Any, Program], tuple]] = {
    steps.Send: _posted,
    steps.Receive: _posted,
    steps.Wait: lambda step, program: (Executor._wait, step),
    steps.Clear: lambda step, program: (Executor._clear, step.rows),
    steps.Attend: lambda step, program: (Executor._attend, step, _intervals(step, program)),
    steps.Differentiate: lambda step, program: (
        Executor._differentiate,
        step,
        _intervals(step, program),
    ),
    steps.Merge: _merging,
    steps.Copy: _moved,
    steps.Add: _moved,
    steps.Encode: lambda step, program: (Executor._code, "encode", common_rows(*step)),
    steps.Decode: lambda step, program: (Executor._code, "decode", common_rows(*step)),
    steps.TakeHeads: lambda step, program: (Executor._take_heads, step),
    steps.PutHeads: lambda step, program: (Executor._put_heads, step),
}


def _intervals(step: steps.KernelCall, program: Program) -> Intervals:
    """Return the visible keys of a kernel call; refuse rows that a kernel cannot take."""
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
    return program.intervals(queries, keys)


def _three(x: Array) -> Array:
    """Return a view of shape (tokens, heads, elements)."""
    return x if x.ndim == 3 else x.reshape(*x.shape, 1)


def _tag(message: steps.Message, program: Program) -> int:
    """Return the MPI tag of a message's first tensor."""
    # Messages with other tags or turns may overtake this one.
    turn = (message.tag + 8 * message.turn) % _TURNS
    return _TAGS[program.arrays[message.rows.array].kind] + _STRIDE * turn
