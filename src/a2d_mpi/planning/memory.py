"""Bytes that a rank holds at most: its arrays, and the buffers of its schedules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from a2d_mpi.core.config import OF_KEYS, PHASES
from a2d_mpi.core.meetings import Ranks
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules import write, write_all
from a2d_mpi.schedules.accounts import buffers as schedule_buffers
from a2d_mpi.schedules.accounts import results
from a2d_mpi.schedules.places import own_cuts
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.steps import KINDS


def peak_memory(
    method: str, layout: Layout, problem: Problem, rank: int, backward: bool = False
) -> int:
    """Bytes of the caller's arrays, the results and the plan's buffers on a logical rank.

    Small things (blocks of the kernel, intervals: 16 bytes a query and piece) are not counted.

    Parameters
    ----------
    method, layout, problem, rank
        As in `a2d_mpi.planning.cost.traffic`.
    backward : bool
    """
    phases = _phases(method, layout, problem, rank, backward)
    return int(_peak(phases, layout, problem, rank, backward))


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


def most_memory(method: str, layout: Layout, problem: Problem, backward: bool = False) -> int:
    """`peak_memory` of the rank that holds the most, about.

    See `a2d_mpi.schedules.accounts.buffers` for what it leaves out where it reads the schedules of
    all ranks at once.
    """
    phases = PHASES[: 1 + backward]
    chains = list(zip(*(write_all(method, x, layout, problem) for x in phases)))
    ranks = [np.arange(layout.size)] if len(chains) == 1 else range(layout.size)
    return max(
        int(np.max(_peak(x, layout, problem, rank, backward))) for rank, x in zip(ranks, chains)
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
