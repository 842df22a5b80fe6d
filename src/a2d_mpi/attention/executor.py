"""The executor of programs: each step is one function on the arrays of a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from a2d_mpi.attention.arrays import Arrays
from a2d_mpi.attention.engine import Engine
from a2d_mpi.comm.channel import Channel
from a2d_mpi.core.sizes import Layout
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Constant
from a2d_mpi.masks.intervals import Intervals
from a2d_mpi.schedules import write
from a2d_mpi.schedules.arrays import common_rows, index_of
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import (
    KINDS,
    Add,
    Attend,
    Barrier,
    Clear,
    Copy,
    Decode,
    Differentiate,
    Encode,
    KernelCall,
    Merge,
    Message,
    PutHeads,
    Receive,
    Rows,
    Send,
    TakeHeads,
    Wait,
)

_TENSORS = 4  # most tensors of a kind that is no parcel; each tensor has a tag of its own
_TAGS = {kind: _TENSORS * i for i, kind in enumerate(KINDS)}
_STRIDE = _TENSORS * len(KINDS)
_TURNS = 32000 // _STRIDE  # MPI guarantees tags up to 32767


def executors(
    method: str, phase: str, layout: Layout, problem: Problem, rank: int, overlap: bool
) -> list[Executor]:
    """Make the executors of a rank in one phase; they run one after the other.

    The parameters are the parameters of `a2d_mpi.schedules.write`.
    """
    programs = write(method, phase, layout, problem, rank, overlap)
    return [Executor(x) for x in programs]


class Executor:
    """A program, compiled when it is made: operands are looked up, masks become intervals.

    Parameters
    ----------
    program : Program
    """

    def __init__(self, program: Program) -> None:
        self.channels, self._arrays = program.channels, Arrays(program)
        self._wire = program.group.config.wire
        self.copied = bool(program.copied)
        self._messages = program.messages
        self._pending: list[list[Any]] = []  # requests of each message
        self._steps = [_COMPILED[type(step)](step, program) for step in program.steps]

    def run(
        self,
        engine: Engine,
        channels: Mapping[str, Channel],
        given: Mapping[str, Array],
        options: Mapping[str, Any],
        accumulated: bool = False,
    ) -> dict[str, Array]:
        """Run all steps.

        Parameters
        ----------
        engine : Engine
        channels : mapping of str to Channel
            By the names of the program.
        given : mapping of str to arrays
            This rank's shard of the tensors that the program reads.
        options : mapping
            Arguments of the kernel for this call, such as `careful`.
        accumulated : bool
            Make results of the accumulation dtype, whatever the program says.

        Returns
        -------
        dict of str to arrays
            This rank's shard of the results.
        """
        self._engine, self._channels, self._options = engine, channels, options
        self._arrays.begin(engine, given, accumulated)
        self._pending = [[]] * self._messages
        for do, *operands in engine.clocked(self._steps):
            do(self, *operands)
        return self._arrays.end()

    def _post(self, message: Message, peer: int, tag: int) -> None:
        channel = self._channels[message.channel]
        start = channel.isend if isinstance(message, Send) else channel.irecv
        self._pending[message.index] = start(self._arrays.travelling(message.rows), peer, tag)

    def _enter(self, barrier: Barrier) -> None:
        self._pending[barrier.index] = self._channels[barrier.channel].barrier()

    def _wait(self, step: Wait) -> None:
        requests = [x for index in step.messages for x in self._pending[index]]
        if requests:
            self._channels[step.channel].wait(requests)

    def _clear(self, rows: Rows) -> None:
        for x in self._arrays.tensors(rows):
            self._engine.device.zero(x)

    def _attend(self, step: Attend, intervals: Intervals) -> None:
        tensors = self._arrays.tensors
        (q,) = tensors(step.queries)  # (queries, nheads, headdim)
        k, v = tensors(step.keys)  # (keys, nheads_kv, headdim)
        out, lse = tensors(step.target)
        with self._engine.clock("compute"):
            self._engine.kernel.forward(q, k, v, intervals, out, lse, **self._options)

    def _differentiate(self, step: Differentiate, intervals: Intervals) -> None:
        tensors, kernel = self._arrays.tensors, self._engine.kernel
        dout, q, lse, delta = tensors(step.queries)  # q: (queries, nheads, headdim)
        k, v = tensors(step.keys)  # (keys, nheads_kv, headdim)
        gradients = *tensors(step.dq), *tensors(step.dkv)  # as q, k, v
        given = dout, q, k, v, lse, delta, intervals
        with self._engine.clock("compute"):
            kernel.backward(*given, *gradients, fresh=step.fresh, **self._options)

    def _merge(self, parts: list[tuple[Rows, Rows, Rows]]) -> None:
        tensors = self._arrays.tensors
        with self._engine.clock("merge"):
            for source, target, compensation in parts:
                held = *tensors(target), *tensors(compensation)
                self._engine.device.merge(*held, *tensors(source))

    def _put(self, parts: list[tuple[Rows, Rows]], add: bool) -> None:
        tensors = self._arrays.tensors
        with self._engine.clock("merge"):
            for source, target in parts:
                for x, y in zip(tensors(source), tensors(target)):
                    self._engine.device.put(y, x, add)

    def _by_index(self, how: str, source: str, target: str, index: Constant) -> None:
        move = getattr(self._engine.device, how)
        with self._engine.clock("merge"):
            for x, y in zip(self._arrays.all_rows(source), self._arrays.all_rows(target)):
                move(y, x, index.on(self._engine.device))

    def _code(self, how: str, parts: list[tuple[Rows, Rows]]) -> None:
        tensors, device = self._arrays.tensors, self._engine.device
        with self._engine.clock("merge"):
            for source, target in parts:
                for x, y in zip(tensors(source), tensors(target)):
                    if x.shape == y.shape and x.dtype == y.dtype:  # it travels as it is
                        device.put(y, x)
                    else:
                        getattr(device, how)(y, x, self._wire)

    def _take_heads(self, step: TakeHeads) -> None:
        arrays, device = self._arrays, self._engine.device
        first = arrays.first_heads(step.source, step.head)
        with self._engine.clock("merge"):
            for x, y, head in zip(arrays.tensors(step.source), arrays.tensors(step.target), first):
                device.take_heads(_three(y), _three(x), head)

    def _put_heads(self, step: PutHeads) -> None:
        arrays, device = self._arrays, self._engine.device
        first, names = arrays.first_heads(step.target, step.head), KINDS[arrays.kind(step.target)]
        tensors = arrays.tensors(step.source), arrays.tensors(step.target)
        with self._engine.clock("merge"):
            for x, y, head, name in zip(*tensors, first, names):
                device.put_heads(_three(y), _three(x), head, name in step.sums)


def _posted(step: Message, program: Program) -> tuple:
    peer = program.channels[step.channel].index(step.peer)
    return Executor._post, step, peer, _tag(step, program)


def _called(step: KernelCall, program: Program) -> tuple:
    run = Executor._attend if isinstance(step, Attend) else Executor._differentiate
    return run, step, _intervals(step, program)


def _merging(step: Merge, program: Program) -> tuple:
    compensation = (x for _, x in common_rows(step.source, step.compensation))
    pairs = common_rows(step.source, step.target)
    return Executor._merge, [(*both, x) for both, x in zip(pairs, compensation)]


def _moved(step: Copy | Add, program: Program) -> tuple:
    """Move rows run by run; between an order by piece and an order by token, by index."""
    (source, target), add = step, isinstance(step, Add)
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
    Send: _posted,
    Receive: _posted,
    Barrier: lambda step, program: (Executor._enter, step),
    Wait: lambda step, program: (Executor._wait, step),
    Clear: lambda step, program: (Executor._clear, step.rows),
    Attend: _called,
    Differentiate: _called,
    Merge: _merging,
    Copy: _moved,
    Add: _moved,
    Encode: lambda step, program: (Executor._code, "encode", common_rows(*step)),
    Decode: lambda step, program: (Executor._code, "decode", common_rows(*step)),
    TakeHeads: lambda step, program: (Executor._take_heads, step),
    PutHeads: lambda step, program: (Executor._put_heads, step),
}


def _intervals(step: KernelCall, program: Program) -> Intervals:
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
    return Intervals.of(program.mask.intervals(queries, keys))


def _three(x: Array) -> Array:
    """Return a view of shape (tokens, heads, elements)."""
    return x if x.ndim == 3 else x.reshape(*x.shape, 1)


def _tag(message: Message, program: Program) -> int:
    """Return the MPI tag of a message's first tensor."""
    # Messages with other tags or turns may overtake this one.
    turn = (message.tag + 8 * message.turn) % _TURNS
    return _TAGS[program.arrays[message.rows.array].kind] + _STRIDE * turn
