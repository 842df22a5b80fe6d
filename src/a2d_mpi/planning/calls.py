"""Seconds of the kernel calls of schedules, by the machine's kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from a2d_mpi.core.chunks import FIRST_SHARE
from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.masks import Mask
from a2d_mpi.core.pairs import by_rows, merged, pairs_of_runs, visible_pairs
from a2d_mpi.core.problem import Problem
from a2d_mpi.planning.machine import KernelModel
from a2d_mpi.schedules.accounts import Tokens
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import chunk_of
from a2d_mpi.schedules.steps import FIRST, REST, Attend, Rows


class _Calls:
    """Seconds of the kernel calls of a phase.

    Parameters
    ----------
    kernel : KernelModel
    share : float
        Of a core that a rank has.
    group : Problem
        Of the context group.
    phase : str
    """

    def __init__(self, kernel: KernelModel, share: float, group: Problem, phase: str) -> None:
        config = group.config
        self._heads = config.nheads, config.nheads_kv, config.headdim
        self._kernel, self._share, self._back = kernel, share, phase == "backward"
        self._shards = group.mask, group.shards, group.shards_kv


class KernelCalls(_Calls):
    """Calls on shards of a context group, of all ranks at once; arguments as of `_Calls`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._area, self._cut = visible_pairs(*self._shards)
        sizes = *self._shards, self._heads
        self._pair = _pair_seconds(self._kernel, *sizes, self._back, self._share)

    def begin(self, schedule: Schedule, tokens: Tokens) -> None:
        """Set out on a schedule."""
        self._schedule, self._tokens = schedule, tokens
        self._sums: dict[tuple[str, bool], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def seconds(self, step: Attend) -> np.ndarray:
        """Of one call of every rank."""
        q, k = self._owner(step.queries), self._owner(step.keys)
        q_share, k_share = self._part(step.queries), self._part(step.keys)
        if q is not None and k is not None:
            return q_share * k_share * self._pair[q, k]
        nq, nk = self._tokens.of(step.queries), self._tokens.of(step.keys)
        if k is None:
            area, cut, which = self._summed(step.keys.array, of_keys=True)
            cut = q_share * cut[q, which]
            area = q_share * area[q, which]
        else:
            area, cut, which = self._summed(step.queries.array, of_keys=False)
            area, cut = k_share * area[which, k], cut[which, k]
        found = self._kernel.seconds(area, nq, nk, np.minimum(nq, cut), self._heads, self._back)
        return np.where(area > 0, found, 0.0) / self._share

    def _owner(self, rows: Rows) -> np.ndarray | None:
        """The one whose tokens they are; None: there are several."""
        owners = self._schedule.arrays[rows.array].owners
        if rows.owner is None and len(owners) == 1:
            return owners[0]
        return rows.owner

    def _part(self, rows: Rows) -> float:
        """The share of the owner's visible pairs that these have, about."""
        if isinstance(rows.part, str):
            return {FIRST: FIRST_SHARE, REST: 1 - FIRST_SHARE}[rows.part]
        if (chunk := chunk_of(rows.part)) is None:
            return 1.0  # all that meet others
        of_keys = self._schedule.arrays[rows.array].of_keys
        return 1 / len(self._schedule.sizes.chunks(rows.owner, chunk[1], of_keys))

    def _summed(self, array: str, of_keys: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Areas and cut queries with all rows of an array, by set of owners, and each rank's set.

        (shards, sets) for arrays of keys, (sets, shards) for those of queries.
        """
        key = array, of_keys
        if key not in self._sums:
            owners = np.sort(self._schedule.arrays[array].owners, axis=0)  # (owners, P)
            # Ranks with the same owners have the same sum of owners' random numbers.
            numbers = np.random.default_rng(0).integers(
                1 << 63, size=len(self._area), dtype=np.uint64
            )
            _, first, which = np.unique(
                numbers[owners].sum(axis=0),
                return_index=True,
                return_inverse=True,
            )
            assert (owners[:, first][:, which] == owners).all()
            sets = owners[:, first].T  # (sets, owners)
            self._sums[key] = (
                *(
                    np.stack([x[:, s].sum(axis=1) for s in sets], axis=1)
                    if of_keys
                    else np.stack([x[s].sum(axis=0) for s in sets])
                    for x in (self._area, self._cut)
                ),
                which,
            )
        return self._sums[key]


class SingleCalls(_Calls):
    """Calls of one rank after the other, whose schedules differ; arguments as of `_Calls`."""

    def begin(self, schedule: Schedule, tokens: Tokens) -> None:
        """Set out on a schedule of one rank."""
        self._schedule, self._seconds = schedule, iter(())
        calls = [x for x in schedule.steps if isinstance(x, Attend)]
        if calls:  # all at once: NumPy takes as long for one
            places, found = tokens.places, []
            for x in calls:
                q, k = (merged(places.runs(rows)) for rows in (x.queries, x.keys))
                area, cut = pairs_of_runs(schedule.mask or self._shards[0], q, k)
                found.append((area, sum(map(len, q)), sum(map(len, k)), cut))
            sizes = np.array(found, float).T
            seconds = self._kernel.seconds(*sizes, self._heads, self._back) / self._share
            self._seconds = iter(seconds.tolist())

    def seconds(self, step: Attend) -> float:
        """Of the next call."""
        return next(self._seconds)


@lru_cache(maxsize=2)  # both phases of layouts that differ in shape only
def _pair_seconds(
    kernel: KernelModel,
    mask: Mask,
    queries: Distribution,
    keys: Distribution,
    heads: tuple[int, int, int],
    backward: bool,
    share: float,
) -> np.ndarray:
    """Of the kernel for queries of one shard and keys of another, by share of a core."""
    area, cut = visible_pairs(mask, queries, keys)
    nq, nk = np.array(queries.counts), np.array(keys.counts)
    found = np.empty(area.shape)
    for rows in by_rows(queries.nshards):
        sizes = area[rows], nq[rows, None], nk[None, :], cut[rows]
        seconds = kernel.seconds(*sizes, heads, backward) / share
        found[rows] = np.where(area[rows] > 0, seconds, 0.0)  # left out
    return found
