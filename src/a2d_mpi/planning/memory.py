"""Bytes that a rank holds at most: arrays, buffers of its programs, and buffers of its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from a2d_mpi.core.config import OF_KEYS, PHASES, AttentionConfig
from a2d_mpi.core.kernel_memory import kernel_buffers
from a2d_mpi.core.masks import Causal, Full
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules import write
from a2d_mpi.schedules.accounts import buffers as program_buffers
from a2d_mpi.schedules.accounts import nbytes
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS, Attend, Differentiate, Merge

# Bytes that the first calls of a kernel of the host load, by NumPy, OpenBLAS, MPI, Numba and this
# package.  Measured with plans of 64 tokens on 1, 2 and 4 ranks, with MPICH and Open MPI: 3 to 5.5
# MB, and 109 to 112 MB with Numba 0.68, 73 of them files, which processes share.  Numba takes
# 32 MB more where it has yet to compile, at its first import.
LIBRARIES = {"numpy": 4_500_000, "numba": 111_000_000}
INTERVAL = 16  # bytes of the begin and end of a query's visible keys
STATISTICS = 56  # bytes for each lse of a merge, while it lasts


def peak_memory(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    backward: bool = False,
    kernel: str | None = None,
) -> int:
    """Bytes of the caller's arrays, the results, the plan's buffers and its kernel on a rank.

    In one call of each phase.

    Parameters
    ----------
    method, layout, problem, rank
        As in `a2d_mpi.planning.cost.moves`.
    backward : bool
    kernel : {"numpy", "numba"}, optional
        Of the host: its buffers and `LIBRARIES` count, so that this is by how much the process
        grows (tests/memory.py measures it).  Default: a kernel that needs none, as on a GPU.
    """
    phases = _phases(method, layout, problem, rank, backward)
    return peak_of(phases, problem, rank, kernel)


def most_memory(
    method: str,
    layout: Layout,
    problem: Problem,
    backward: bool = False,
    kernel: str | None = None,
) -> int:
    """`peak_memory` of the rank that holds the most."""
    ranks = range(layout.size)
    return max(peak_memory(method, layout, problem, rank, backward, kernel) for rank in ranks)


def buffers(
    method: str, layout: Layout, problem: Problem, rank: int, backward: bool = False
) -> int:
    """Bytes that a plan keeps between calls (`AttentionPlan.buffer_bytes`); see `peak_memory`.

    `backward`: after a backward call.
    """
    return _buffers(_phases(method, layout, problem, rank, backward))


def peak_of(
    phases: Sequence[list[Program]], problem: Problem, rank: int, kernel: str | None = None
) -> int:
    """The same as `peak_memory`, for programs of one phase or of both that are there already."""
    held, config, last = _buffers(phases), problem.config, phases[-1]
    if kernel is not None:
        held += LIBRARIES[kernel] + _of_kernel(phases)
    own = problem.counts[rank], problem.counts_kv[rank]
    given = ("q", "k", "v", *("dout", "out", "lse", "delta") * (len(phases) > 1))
    held += sum(own[x in OF_KEYS] * config.nbytes(x) for x in given)
    for program in last:
        results = (name for name, array in program.arrays.items() if array.role == "result")
        held += sum(nbytes(program, program.rows(name)) for name in results)
    # New once more: results that lie in buffers or have the accumulation dtype.
    for array in (last[-1].arrays[rows.array] for rows in last[-1].results.values()):
        for name in KINDS[array.kind]:
            rounded = name in array.accumulated and config.narrow
            if name != "lse" and (array.role == "buffer" or rounded):
                held += own[name in OF_KEYS] * config.nbytes(name)
    return held


def _phases(
    method: str, layout: Layout, problem: Problem, rank: int, backward: bool
) -> list[list[Program]]:
    return [write(method, x, layout, problem, rank) for x in PHASES[: 1 + backward]]


def _buffers(phases: Sequence[list[Program]]) -> int:
    held: dict[tuple[str, str], int] = {}
    for program in chain.from_iterable(phases):
        for key, size in program_buffers(program).items():
            held[key] = max(size, held.get(key, 0))
    return sum(held.values())


def _of_kernel(phases: Sequence[list[Program]]) -> int:
    """Bytes that a kernel of the host needs, and bytes of the intervals that it is given."""
    needed: dict[str, int] = {}
    intervals = peak = 0
    for backward, programs in enumerate(phases):
        for program in programs:
            config = program.group.config
            for step in program.steps:
                passing = 0  # for a while
                if isinstance(step, Attend | Differentiate):
                    nq, nk = step.queries.count, step.keys.count
                    pieces, hides = _visible(program, step)
                    intervals += INTERVAL * pieces * nq
                    if not pieces:
                        continue
                    for name, size in kernel_buffers(config, nq, nk, backward > 0, hides).items():
                        needed[name] = max(int(size), needed.get(name, 0))
                elif isinstance(step, Merge):
                    passing = _merge(config, step.source.count)
                peak = max(peak, sum(needed.values()) + passing)
    # After a forward pass there is more to come than it needs for a while.
    return intervals + (sum(needed.values()) if len(phases) > 1 else peak)


def _merge(config: AttentionConfig, rows: int) -> int:
    """Bytes of a merge while it lasts: statistics, and out in the accumulation dtype."""
    return rows * (STATISTICS * config.nheads + config.narrow * config.nbytes("out", wide=True))


def _visible(program: Program, step: Attend | Differentiate) -> tuple[int, bool]:
    """Intervals of a query, 0 if no pair is visible; whether there are keys that no query sees."""
    if not program.sees(step.queries, step.keys):
        return 0, False
    if type(program.mask) is Full:
        return 1, False
    if type(program.mask) is Causal:
        return 1, program.extremes(step.queries)[1] < program.extremes(step.keys)[1]
    queries, keys = program.tokens(step.queries), np.sort(program.tokens(step.keys))
    found = program.mask.intervals(queries, keys)
    change = np.zeros(len(keys) + 1, np.int64)
    for begin, end in found:
        np.add.at(change, begin, 1)
        np.add.at(change, end, -1)
    return len(found), not (np.cumsum(change[:-1]) > 0).all()
