"""Functions of the steps that few programs have: head axes, slices and narrow formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.schedules import steps
from a2d_mpi.schedules.program import Program, common_rows
from a2d_mpi.schedules.steps import KINDS, Step

Run = Callable[[Any], None]  # what an `Executor` runs


def compiled(step: Step, program: Program) -> Run:
    """Compile a step, as `a2d_mpi.attention.executor.compiled` does."""
    of_heads = isinstance(step, steps.TakeHeads | steps.PutHeads)
    return (_compile_heads if of_heads else _compile_code)(step, program)


def _compile_code(step: steps.Encode | steps.Decode, program: Program) -> Run:
    how = "encode" if isinstance(step, steps.Encode) else "decode"
    parts, wire = common_rows(*step), program.group.config.wire

    def code(x: Any) -> None:
        for one, other in x.pairs(parts):
            if one.shape == other.shape and one.dtype == other.dtype:  # it travels as it is
                x.state.device.put(other, one)
            else:
                getattr(x.state.device, how)(other, one, wire)

    return code


def _compile_heads(step: steps.TakeHeads | steps.PutHeads, program: Program) -> Run:
    """Take heads from rows of all heads, or put them there."""
    takes, every = isinstance(step, steps.TakeHeads), program.group.problem.config
    names = KINDS[program.arrays[(step.source if takes else step.target).array].kind]
    own = program.group.config.nheads

    def move_heads(x: Any) -> None:
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


def parcel(
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
