"""Bytes that a rank holds at most: arrays, buffers of its schedules, and those of its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from a2d_mpi.core.config import OF_KEYS, PHASES, AttentionConfig
from a2d_mpi.core.kernel_memory import kernel_buffers
from a2d_mpi.core.masks import Full
from a2d_mpi.core.meetings import Ranks
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules import write, write_all
from a2d_mpi.schedules.accounts import buffers as schedule_buffers
from a2d_mpi.schedules.accounts import merged_at_once, results, tokens_of
from a2d_mpi.schedules.places import own_cuts
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.steps import KINDS, Attend, Merge

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
    """Bytes of the caller's arrays, the results, the plan's buffers and its kernel.

    Of a logical rank, in one call of each phase.

    Parameters
    ----------
    method, layout, problem, rank
        As in `a2d_mpi.planning.cost.traffic`.
    backward : bool
    kernel : {"numpy", "numba"}, optional
        Of the host: its buffers and `LIBRARIES` count, so that this is by how much the process
        grows (tests/memory.py measures it).  Default: one that needs none, as on a GPU.
    """
    phases = _phases(method, layout, problem, rank, backward)
    held = _peak(phases, layout, problem, rank, backward)
    return int(held + _of_kernel(phases, layout, problem, kernel))


def _peak(
    phases: Sequence[list[Schedule]], layout: Layout, problem: Problem, rank: Ranks, backward: bool
) -> Ranks:
    held = _buffers(phases, layout, problem)
    config, last = problem.config, phases[-1]
    own = [np.array(x)[rank] for x in (problem.counts, problem.counts_kv)]
    given = ("q", "k", "v", *("dout", "out", "lse", "delta") * backward)
    held += sum(own[x in OF_KEYS] * config.nbytes(x) for x in given)
    group = config.context_group(layout.heads)
    held += sum(results(schedule, group, config) for schedule in last)
    # New once more: results that lie in buffers or have the dtype of the computation.
    for array in (last[-1].arrays[rows.array] for rows in last[-1].results.values()):
        for name in KINDS[array.kind]:
            wide = name in array.wide and config.narrow
            if name != "lse" and (array.role == "buffer" or wide):
                held += own[name in OF_KEYS] * config.nbytes(name)
    return held


def _of_kernel(
    phases: Sequence[list[Schedule]], layout: Layout, problem: Problem, kernel: str | None
) -> Ranks:
    """Bytes that a kernel of the host needs, and those of the intervals that it is given."""
    if kernel is None:
        return 0
    group = problem.config.context_group(layout.heads)
    needed: dict[str, Ranks] = {}
    intervals = peak = 0
    for phase, schedules in enumerate(phases):
        for schedule in schedules:
            tokens, merged = tokens_of(schedule), iter(merged_at_once(schedule))
            for step in schedule.steps:
                passing = 0  # for a while
                if isinstance(step, Attend):
                    nq, (nk, runs) = tokens.of(step.queries), _keys(schedule, step)
                    pieces, hides = _visible(schedule, problem, step)
                    intervals = intervals + INTERVAL * pieces * runs * nq
                    sums = next(merged) * _merge(group, nq)
                    if not pieces:
                        continue
                    for name, nbytes in kernel_buffers(group, nq, nk, phase > 0, hides).items():
                        needed[name] = np.maximum(nbytes, needed.get(name, 0))
                    passing = sums
                elif isinstance(step, Merge) and schedule.arrays[step.to.array].kind == "out":
                    passing = _merge(group, tokens.of(step.rows))
                peak = np.maximum(peak, sum(needed.values()) + passing)
    # After a forward pass there is more to come than it needs for a while.
    return LIBRARIES[kernel] + intervals + (sum(needed.values()) if len(phases) > 1 else peak)


def most_memory(
    method: str,
    layout: Layout,
    problem: Problem,
    backward: bool = False,
    kernel: str | None = None,
) -> int:
    """`peak_memory` of the rank that holds the most, about.

    See `a2d_mpi.schedules.accounts.buffers` for what it leaves out where it reads the schedules of
    all ranks at once.
    """
    phases = PHASES[: 1 + backward]
    chains = list(zip(*(write_all(method, x, layout, problem) for x in phases)))
    ranks = [np.arange(layout.size)] if len(chains) == 1 else range(layout.size)
    return max(
        int(
            np.max(
                _peak(x, layout, problem, rank, backward) + _of_kernel(x, layout, problem, kernel)
            )
        )
        for rank, x in zip(ranks, chains)
    )


def buffers(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    backward: bool = False,
) -> int:
    """Bytes that a plan keeps between calls (`AttentionPlan.buffer_bytes`); see `peak_memory`.

    Exact, but for parts of one token, which are never out of order.  `backward`: after a backward
    call.
    """
    return int(_buffers(_phases(method, layout, problem, rank, backward), layout, problem))


def _phases(
    method: str, layout: Layout, problem: Problem, rank: int, backward: bool
) -> list[list[Schedule]]:
    phases = PHASES[: 1 + backward]
    # As plans do: a rank that keeps some of its own work for the end may need sorted keys for it.
    return [write(method, x, layout, problem, rank, cuts=own_cuts({})) for x in phases]


def _buffers(phases: Sequence[list[Schedule]], layout: Layout, problem: Problem) -> Ranks:
    group = problem.config.context_group(layout.heads)
    held: dict[object, int] = {}
    for schedule in chain.from_iterable(phases):
        for key, nbytes in schedule_buffers(schedule, group).items():
            held[key] = np.maximum(nbytes, held.get(key, 0))
    return sum(held.values())


def _merge(group: AttentionConfig, rows: Ranks) -> Ranks:
    """Bytes of a merge of rows while it lasts: statistics, and out as wide as it is computed."""
    return rows * (STATISTICS * group.nheads + group.narrow * group.nbytes("out", wide=True))


def _keys(schedule: Schedule, step: Attend) -> tuple[Ranks, int]:
    """Keys of the largest kernel call for a step, and calls: backward ones are made run by run."""
    tokens, found = tokens_of(schedule), []
    whole = not isinstance(step.keys.part, str)
    if whole and tokens.places is not None and step.keys_into is not None:
        found = [b - a for a, b, *_ in tokens.places.common_runs(step.keys, step.keys_into)]
    return max(found, default=tokens.of(step.keys)), max(1, len(found))


def _visible(schedule: Schedule, problem: Problem, step: Attend) -> tuple[int, bool]:
    """Intervals of a query, 0 if no pair is visible; whether there are keys that no query sees."""
    mask, places = schedule.mask or problem.mask, tokens_of(schedule).places
    cut = any(isinstance(x.part, str) for x in (step.queries, step.keys))
    if places is None or cut:  # of all ranks at once, or a share of own work: nearly always
        return 1, not isinstance(mask, Full)
    queries, keys = (places.tokens(x) for x in (step.queries, step.keys))
    found = mask.intervals(queries, np.sort(keys))
    change = np.zeros(len(keys) + 1, np.int64)
    for begin, end in found:
        np.add.at(change, begin, 1)
        np.add.at(change, end, -1)
    seen = np.cumsum(change[:-1]) > 0
    return len(found) * bool(seen.any()), not seen.all()
