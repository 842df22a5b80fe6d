"""Bytes, buffers and work of a program: sums over its steps and arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from a2d_mpi.core.sizes import MAX_MESSAGE
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import (
    KINDS,
    Attend,
    Encode,
    KernelCall,
    Merge,
    Message,
    Move,
    Rows,
    Send,
)
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


def roundings(programs: Sequence[Sequence[Program]]) -> dict[str, int]:
    """Return how often a result is encoded on its way to its owner, at most, by tensor.

    Parameters
    ----------
    programs : sequence of sequence of Program
        The programs of all ranks of a layout in one phase.
    """
    sent: dict[tuple, int] = {}  # encodings of the contents of each message, by tensor
    before = None
    while sent != before:
        before, found = dict(sent), Counter()
        for rank, parts in enumerate(programs):
            given: Counter[str] = Counter()
            for number, program in enumerate(parts):
                given = _depths(program, rank, number, given, sent)
            found |= given  # the larger number of each
    return found


def _depths(
    program: Program, rank: int, number: int, given: Counter[str], sent: dict[tuple, int]
) -> Counter[str]:
    """Return how often the results of a program were encoded; add its messages to `sent`."""
    kinds = {name: KINDS[x.kind] for name, x in program.arrays.items()}
    depth: Counter[tuple[str, str]] = Counter()
    for name, array in program.arrays.items():
        if array.role == "given":
            depth.update({(name, x): given[x] for x in kinds[name]})
    for step in program.steps:
        if isinstance(step, Message):
            ends, name = (rank, program.grid_rank(step.peer)), step.rows.array
            for x in kinds[name]:
                key = number, step.tag, step.turn, x
                if isinstance(step, Send):
                    sent[(*ends, *key)] = depth[name, x]
                else:
                    depth[name, x] = max(depth[name, x], sent.get((*ends[::-1], *key), 0))
        elif isinstance(step, Move | Merge):
            for x in kinds[step.target.array]:
                source = depth[step.source.array, x] + isinstance(step, Encode)
                depth[step.target.array, x] = max(depth[step.target.array, x], source)
    results = ((rows, x) for rows in program.results.values() for x in kinds[rows.array])
    return Counter({x: depth[rows.array, x] for rows, x in results})
