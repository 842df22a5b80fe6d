"""Bytes, buffers and work of a program: sums over its steps and arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from a2d_mpi.core.sizes import MAX_MESSAGE
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Attend, KernelCall, Rows
from a2d_mpi.sharding.pairs import pairs_of_runs


def nbytes(program: Program, rows: Rows) -> int:
    """Return the bytes of rows, over all tensors."""
    return rows.count * sum(program.group.row_bytes(program.arrays[rows.array]))


def mpi_messages(program: Program, rows: Rows) -> int:
    """Return the number of MPI messages in which rows travel; large tensors travel in pieces."""
    sizes = program.group.row_bytes(program.arrays[rows.array])
    return sum(-(-rows.count * x // MAX_MESSAGE) for x in sizes)


def area(program: Program) -> int:
    """Return the visible pairs that the rank computes for each head of its CP group."""
    calls = [x for x in program.steps if isinstance(x, Attend)]
    return int(pairs_of(program, calls)[0].sum())


def pairs_of(program: Program, calls: Sequence[KernelCall]) -> np.ndarray:
    """Return the visible pairs of kernel calls, and queries that need a mask, (2, calls) int64.

    See `a2d_mpi.sharding.pairs.pairs_of_runs`.
    """
    runs = [(program.token_runs(x.queries), program.token_runs(x.keys)) for x in calls]
    return pairs_of_runs(program.mask, runs)


def buffers(program: Program) -> dict[tuple[str, int, bool], int]:
    """Return the bytes of every buffer that a plan keeps for a program.

    Partial results are taken to have the accumulation dtype.

    Returns
    -------
    dict of (str, int, bool) to int
        Bytes by the name of the memory (`TokenArray.memory`), the number of the tensor, and
        whether its rows belong to keys.
    """
    sizes: dict[tuple[str, int, bool], int] = {}
    for array in program.arrays.values():
        if array.role == "buffer":
            for i, size in enumerate(program.group.row_bytes(array)):
                key = array.memory, i, array.of_keys
                sizes[key] = max(sizes.get(key, 0), array.length * size)
    return sizes
