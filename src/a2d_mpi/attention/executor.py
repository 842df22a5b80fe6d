"""The executor of programs: each step is one function on the arrays of a device.

`compiled` makes the function of a step; those of each kind of step stand at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, singledispatch
from typing import Any, NamedTuple

import numpy as np

from a2d_mpi.attention.device_state import DeviceState
from a2d_mpi.comm.channel import Channel
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.masks.intervals import Intervals
from a2d_mpi.schedules import steps
from a2d_mpi.schedules.program import Program, common_rows, index_of
from a2d_mpi.schedules.slices import ALIVE, ATTEND
from a2d_mpi.schedules.steps import KINDS, Rows, Step, TokenArray

Channels = Mapping[str, Channel]  # by the names of the programs
Tensors = dict[str, Array]  # by name
Action = Callable[["Executor"], None]  # a compiled step

# Tags of messages.
_TENSORS = 4  # most tensors of a kind that is no parcel; each tensor has a tag of its own
_TAGS = {kind: _TENSORS * i for i, kind in enumerate(KINDS)}
_STRIDE = _TENSORS * len(KINDS)
_OF_TURN = 8  # tags from one turn to the next
_TURNS = 32000 // _STRIDE // ALIVE // _OF_TURN * _OF_TURN  # MPI guarantees tags up to 32767


class Options(NamedTuple):
    """Options of a call of this rank.

    Attributes
    ----------
    careful, any_delta : bool
        See `a2d_mpi.kernels.protocol.Kernel`.
    sink : (heads,) array or None
        Added to the results of attention, which then have the accumulation dtype.
    """

    careful: bool
    any_delta: bool
    sink: Array | None = None


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
        slices = 1 + max(p.slice for p in programs)
        executors: dict[tuple[int, int], Executor] = {}
        # Each part: executor, compiled steps, and whether its program begins and ends with it.
        # Without head axis and slices there is one.
        self._parts: list[tuple[Executor, list[Action], bool, bool]] = []
        runs: dict[int, Action] = {}  # slices have the same steps
        last = {(p.slice, p.stage): i for i, p in enumerate(programs)}
        for i, p in enumerate(programs):
            key = p.slice, p.stage
            if begins := key not in executors:
                executors[key] = Executor(p, slices)
            for step in p.steps:
                if id(step) not in runs:
                    runs[id(step)] = compiled(step, p)
            ready = [runs[id(step)] for step in p.steps]
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
        tensors: dict[int, Tensors] = {}  # of each slice
        whole: dict[str, Tensors] = {}  # arrays of results, to which all slices write
        for executor, ready, begins, ends in self._parts:  # one, without head axis and slices
            i = executor.slice
            if begins:
                read = tensors.pop(i, given)
                new = whole if executor.stage == self._last else {}
                executor.begin(state, channels, read, options, new)
            executor.run(ready)
            if ends:
                tensors[i] = executor.end()
        results = {name: x for of_slice in tensors.values() for name, x in of_slice.items()}
        for name, x in results.items():
            dtype = self._config.dtype_of(name)
            if x.dtype != dtype or self._in_buffers:
                results[name] = state.device.empty(x.shape, dtype)  # (n, heads, headdim)
                with state.clocks.span("merge"):
                    state.device.put(results[name], x)
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
        self.slice, self.stage, self.slices = program.slice, program.stage, slices
        self._arrays, self._results = program.arrays, program.results
        # Sizes with all heads of the problem, and with the heads that this rank computes.
        self._whole, self._local = program.group.problem.config, program.group.config
        self.pending: list[list[Any]] = [[]] * program.messages  # requests; replaced, not changed
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
        self.state, self.channels, self.options = state, channels, options
        self._given, self._new = given, new
        self._sink = None
        if self.stage == ATTEND and options.sink is not None:
            self._sink = options.sink.reshape(self.slices, -1)[self.slice]
        if self._work is not state.work:
            self._work = state.work
            self._views: dict[Rows, list[Array]] = state.work.cache()
        for name, array in self._arrays.items():
            if array.role == "result" and name not in new:
                new[name] = self._result(array, wide=self._sink is not None)

    def run(self, ready: list[Action]) -> None:
        """Run compiled steps."""
        for do in self.state.clocks.noted(ready):
            do(self)

    def end(self) -> Tensors:
        """End the call, drop the caller's arrays, and return the results by name."""
        results = {
            name: x
            for rows in self._results.values()
            for name, x in zip(KINDS[self._arrays[rows.array].kind], self.tensors(rows))
        }
        if self._sink is not None:
            with self.state.clocks.span("merge"):
                self.state.device.add_sink(sink=self._sink, **results)
        self._given, self._new = {}, {}
        return results

    def tensors(self, rows: Rows) -> list[Array]:
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
        as_computed = array.as_computed and getattr(self.state.kernel, "rounds_partials", False)
        shapes = _shapes(array, self._local, () if as_computed else array.accumulated)
        work = self.state.work
        if array.parcel:
            return _parcel(work, (array.memory, 0), shapes)
        return [work.get((array.memory, i), *x) for i, x in enumerate(shapes)]

    def travelling(self, rows: Rows) -> list[Array]:
        """Return the arrays that MPI sends for rows; of a parcel, all of its bytes."""
        tensors, array = self.tensors(rows), self._arrays[rows.array]
        if not array.parcel:
            return tensors
        nbytes = sum(x.nbytes for x in tensors)
        return [self.state.work.get((array.memory, 0), (nbytes,), np.uint8)]

    def _result(self, array: TokenArray, wide: bool) -> Tensors:
        """Make new arrays for results: (tokens, heads, headdim), of lse (tokens, heads).

        If `wide`, they have the accumulation dtype, whatever the program says.
        """
        config, names = self._whole if array.all_heads else self._local, KINDS[array.kind]
        tensors = _shapes(array, config, names if wide else array.accumulated)
        return {name: self.state.device.empty(*x) for name, x in zip(names, tensors)}

    def pairs(self, parts: Iterable[tuple[Rows, Rows]]) -> Iterator[tuple[Array, Array]]:
        """Yield the tensors of sources and targets; what is done meanwhile is merging."""
        with self.state.clocks.span("merge"):
            for source, target in parts:
                yield from zip(self.tensors(source), self.tensors(target))


def _shapes(
    array: TokenArray, config: AttentionConfig, accumulated: tuple[str, ...]
) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Return the shape and dtype of each tensor of an array."""
    rows = (config.row(x, x in accumulated, array.wire) for x in KINDS[array.kind])
    return [((array.length, *shape), dtype) for shape, dtype in rows]


def _parcel(
    work: Workspace, name: object, like: Sequence[tuple[tuple[int, ...], np.dtype]]
) -> list[Array]:
    """Return contiguous tensors that fill the buffer `name` without gaps.

    Parameters
    ----------
    work : Workspace
    name : object
        Name of the buffer, which is one message.
    like : sequence of (shape, dtype)
        Shapes and dtypes of the tensors, whose contents are undefined.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in like]
    message, start = work.get(name, (sum(sizes),), np.uint8), 0
    tensors: list[Any] = [None] * len(like)
    # Tensors with large elements come first, so that all tensors are aligned.
    for i in sorted(range(len(like)), key=lambda i: -like[i][1].itemsize):
        shape, dtype = like[i]
        tensors[i] = message[start : start + sizes[i]].view(dtype).reshape(shape)
        start += sizes[i]
    return tensors


@singledispatch
def compiled(step: Step, program: Program) -> Action:
    """Compile a step of a program to a function, which the executors of all slices run.

    What the function finds must not depend on the slice.
    """
    raise TypeError(f"the executor has no function for {step}")


def mpi_tag(kind: str, tag: int, turn: int, slice_: int) -> int:
    """Return MPI's tag for the first tensor of a message; its other tensors have the next tags.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    tag, turn : int
        As of a `a2d_mpi.schedules.steps.Message`.
    slice_ : int
        Slice of the heads.

    Notes
    -----
    Messages with other arguments may overtake this one.  `ALIVE` slices travel at once.  Equal
    sums of a tag and turns do not clash.  Only two kinds of messages have several turns: messages
    of rings, which have one tag, and chunks on lines of two ranks, each of which sends rows of one
    owner.

    Examples
    --------
    Keys and values of owner 2 have the tags of one slice, and of the next slice:

    >>> mpi_tag("kv", 2, 0, slice_=0), mpi_tag("kv", 2, 0, slice_=1)
    (88, 10648)
    """
    place = slice_ % ALIVE * _TURNS + (tag + _OF_TURN * turn) % _TURNS
    return _TAGS[kind] + _STRIDE * place


@compiled.register(steps.Message)
def _compile_message(step: steps.Message, program: Program) -> Action:
    peer = program.channels[step.channel].index(step.peer)
    kind, sends = program.arrays[step.rows.array].kind, isinstance(step, steps.Send)

    def post(x: Executor) -> None:
        start = x.channels[step.channel].isend if sends else x.channels[step.channel].irecv
        tag = mpi_tag(kind, step.tag, step.turn, x.slice)
        x.pending[step.index] = start(x.travelling(step.rows), peer, tag)

    return post


@compiled.register(steps.Wait)
def _compile_wait(step: steps.Wait, program: Program) -> Action:
    def wait(x: Executor) -> None:
        if requests := [y for index in step.messages for y in x.pending[index]]:
            x.channels[step.channel].wait(requests)

    return wait


@compiled.register(steps.Clear)
def _compile_clear(step: steps.Clear, program: Program) -> Action:
    def clear(x: Executor) -> None:
        for tensor in x.tensors(step.rows):
            x.state.device.zero(tensor)

    return clear


@compiled.register(steps.Attend)
def _compile_attend(step: steps.Attend, program: Program) -> Action:
    intervals = _intervals(step, program)

    def attend(x: Executor) -> None:
        (q,) = x.tensors(step.queries)  # (queries, nheads, headdim)
        k, v = x.tensors(step.keys)  # (keys, nheads_kv, headdim)
        given = q, k, v, intervals, *x.tensors(step.target)
        x.state.blocks["forward", x.state.kernel.name] += 1
        with x.state.clocks.span("compute"):
            x.state.kernel.forward(*given, careful=x.options.careful)

    return attend


@compiled.register(steps.Differentiate)
def _compile_differentiate(step: steps.Differentiate, program: Program) -> Action:
    intervals = _intervals(step, program)

    def differentiate(x: Executor) -> None:
        dout, q, lse, delta = x.tensors(step.queries)  # q: (queries, nheads, headdim)
        k, v = x.tensors(step.keys)  # (keys, nheads_kv, headdim)
        given = dout, q, k, v, lse, delta, intervals, *x.tensors(step.dq), *x.tensors(step.dkv)
        careful, any_delta = x.options.careful, x.options.any_delta
        x.state.blocks["backward", x.state.kernel.name] += 1
        with x.state.clocks.span("compute"):
            x.state.kernel.backward(*given, fresh=step.fresh, careful=careful, any_delta=any_delta)

    return differentiate


def _intervals(step: steps.KernelCall, program: Program) -> Intervals:
    """Find the visible keys of a kernel call; refuse rows that a kernel cannot take."""
    for rows in (x for x in step if isinstance(x, Rows)):
        if len(rows.runs) > 1:
            raise ValueError(
                f"a kernel call takes one run of rows, got {len(rows.runs)} runs of {rows.array!r}"
            )
    return program.mask.intervals(program.tokens(step.queries), program.tokens(step.keys))


@compiled.register(steps.Merge)
def _compile_merge(step: steps.Merge, program: Program) -> Action:
    both = (common_rows(step.source, x) for x in (step.target, step.compensation))
    parts = [(*pair, compensation) for pair, (_, compensation) in zip(*both)]

    def merge(x: Executor) -> None:
        with x.state.clocks.span("merge"):
            for source, target, compensation in parts:
                merged = *x.tensors(target), *x.tensors(compensation)
                x.state.device.merge(*merged, *x.tensors(source))

    return merge


@compiled.register(steps.Copy)
@compiled.register(steps.Add)
def _compile_move(step: steps.Copy | steps.Add, program: Program) -> Action:
    """Move rows run by run; between an order by piece and an order by token, by index.

    By index, an addition scatters all rows of the source.  A copy gathers into a target by token,
    scatters into a part of a target by piece, and gathers into all of it, by the inverse index.
    """
    (source, target), add = step, isinstance(step, steps.Add)
    by_token, into_by_token = (program.arrays[x.array].by_token for x in step)
    if by_token == into_by_token:
        parts = common_rows(source, target)

        def put(x: Executor) -> None:
            for one, other in x.pairs(parts):
                x.state.device.put(other, one, add)

        return put
    index = np.empty(source.count, np.int64)
    if add:
        how, index[index_of(source)] = "add_at", index_of(target)
    elif by_token:
        how, index[:] = "take", index_of(source)
    elif target.count < program.arrays[target.array].length:
        how, index[:] = "put_at", index_of(target)
    else:
        how, index[index_of(target)] = "take", index_of(source)
    index_on = cache(lambda device: device.upload(index))  # once for each device
    whole = tuple(program.rows(x.array) for x in step)

    def move(x: Executor) -> None:
        move_rows, on_device = getattr(x.state.device, how), index_on(x.state.device)
        for one, other in x.pairs([whole]):
            move_rows(other, one, on_device)

    return move


@compiled.register(steps.Encode)
@compiled.register(steps.Decode)
def _compile_code(step: steps.Encode | steps.Decode, program: Program) -> Action:
    how = "encode" if isinstance(step, steps.Encode) else "decode"
    parts, wire = common_rows(*step), program.group.config.wire

    def code(x: Executor) -> None:
        for one, other in x.pairs(parts):
            if one.shape == other.shape and one.dtype == other.dtype:  # it travels as it is
                x.state.device.put(other, one)
            else:
                getattr(x.state.device, how)(other, one, wire)

    return code


@compiled.register(steps.TakeHeads)
@compiled.register(steps.PutHeads)
def _compile_heads(step: steps.TakeHeads | steps.PutHeads, program: Program) -> Action:
    """Take heads from rows of all heads, or put them there."""
    takes, every = isinstance(step, steps.TakeHeads), program.group.problem.config
    names = KINDS[program.arrays[(step.source if takes else step.target).array].kind]
    own = program.group.config.nheads

    def move_heads(x: Executor) -> None:
        device, tensors = x.state.device, (x.tensors(step.source), x.tensors(step.target))
        first = (step.head * x.slices + x.slice) * own
        with x.state.clocks.span("merge"):
            for name, one, other in zip(names, *map(_with_elements, tensors)):
                head = first * every.shape(name)[0] // every.nheads
                if takes:
                    device.take_heads(other, one, head)
                else:
                    device.put_heads(other, one, head, name in step.sums)

    return move_heads


def _with_elements(tensors: list[Array]) -> list[Array]:
    """Return views of shape (tokens, heads, elements), also of lse and delta."""
    return [x if x.ndim == 3 else x.reshape(*x.shape, 1) for x in tensors]
