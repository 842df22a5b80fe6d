"""Bytes, buffers and work of a program: sums over its steps and arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Attend, Differentiate, Rows
from a2d_mpi.sharding.pairs import pairs_of_runs


def nbytes(program: Program, rows: Rows) -> int:
    """Bytes of rows, of all tensors."""
    return rows.count * sum(program.group.row_bytes(program.arrays[rows.array]))


def area(program: Program) -> int:
    """Visible pairs that the rank computes for each head of its context-parallel group."""
    calls = [x for x in program.steps if isinstance(x, Attend)]
    return int(pairs_of(program, calls)[0].sum())


def pairs_of(program: Program, calls: Sequence[Attend | Differentiate]) -> np.ndarray:
    """Visible pairs of kernel calls, and queries that need a mask, (2, calls) int64."""
    runs = [(program.token_runs(x.queries), program.token_runs(x.keys)) for x in calls]
    return pairs_of_runs(program.mask, runs)


def buffers(program: Program) -> dict[tuple[str, int], int]:
    """Bytes of every buffer that a plan keeps for a program, by room and number of the tensor.

    As if the kernel wrote partial results in the accumulation dtype.
    """
    found: dict[tuple[str, int], int] = {}
    for name, array in program.arrays.items():
        if array.role == "buffer":
            for i, size in enumerate(program.group.row_bytes(array)):
                key = array.room or name, i
                found[key] = max(found.get(key, 0), array.length * size)
    return found
