"""Seconds that a method takes on a machine: its schedules, gone through for all ranks at once.

All ranks set out together.  Each does the steps of its schedule and waits for what is not there
yet: kernel calls by the machine's kernel (`a2d_mpi.planning.machine.KernelModel`), messages by its
links (`a2d_mpi.planning.clock.Links`), copies and merges by the bytes that they touch.  What a
transfer takes from the core of its receiver is the link's ``1 - hidden``.  This module does not
import MPI and knows no method.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from a2d_mpi.core.chunks import FIRST_SHARE
from a2d_mpi.core.config import AttentionConfig, Workload
from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.masks import Mask
from a2d_mpi.core.pairs import by_rows, visible_pairs
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.clock import Clock, Links
from a2d_mpi.planning.machine import KernelModel, Machine
from a2d_mpi.schedules import distribution_of, write_all
from a2d_mpi.schedules.accounts import Tokens, array_bytes, merged_at_once, sorted_arrays
from a2d_mpi.schedules.steps import (
    FIRST,
    REST,
    Attend,
    Copy,
    Merge,
    Message,
    Rows,
    Schedule,
    Wait,
    Zero,
    identity,
)


@dataclass(frozen=True)
class Phase:
    """Seconds of every logical rank, each (P,) float64; their sum is `total`.

    The parts are those of ``AttentionPlan.timings``; `other` is what these leave out: setting
    out, posting messages, copies and zeros.
    """

    compute: np.ndarray
    merge: np.ndarray
    wait: np.ndarray
    other: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Seconds of every rank."""
        return self.compute + self.merge + self.wait + self.other


def predict(
    machine: Machine,
    method: str,
    layout: Layout,
    work: Workload,
    distribution: str | None = None,
    spans: dict[str, list[tuple[str, np.ndarray, np.ndarray]]] | None = None,
) -> dict[str, Phase]:
    """Seconds of every rank, by phase.

    Parameters
    ----------
    machine : Machine
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    layout : Layout
    work : Workload
    distribution : str, optional
        Default: the one that the method takes for the mask.
    spans : dict, optional
        Gets, by phase, the part, the begin and the end of all that every rank does, in order:
        (str, (P,), (P,)), seconds since the phase began.

    Raises
    ------
    ValueError
        If the heads do not fit the layout, or the machine has no kernel for the dtype.
    """
    name = distribution or distribution_of(method, work.mask)
    found = {}
    for phase in work.phases:
        trace = None if spans is None else spans.setdefault(phase, [])
        found[phase] = Phase(**_Ranks(machine, layout, work, name, phase, trace).go(method))
    return found


class _Ranks:
    """All ranks in one phase."""

    def __init__(
        self,
        machine: Machine,
        layout: Layout,
        work: Workload,
        distribution: str,
        phase: str,
        spans: list | None,
    ) -> None:
        self._machine, self._phase, self._layout, self._work = machine, phase, layout, work
        self._problem = work.problem(layout, distribution)
        self._group = work.context_group(layout.heads)
        self._clock = Clock(layout.size, spans)
        self._links = Links(machine, layout, self._clock)
        self._in_order = distribution == "contiguous"
        shards = Distribution(distribution, work.seqlen, layout.positions)
        self._kernel = _KernelCalls(
            machine.kernel(work.dtype, phase), machine.share, work.mask, shards, self._group, phase
        )

    def go(self, method: str) -> dict[str, np.ndarray]:
        """Go through the whole phase; returns the seconds of each part."""
        spend, problem = self._clock.spend, self._problem
        spend("other", self._machine.start)
        if self._phase == "backward":  # delta
            spend("compute", self._copying(2 * np.array(problem.counts) * self._work.nbytes("q")))
        overlap = self._work.overlap
        schedules = write_all(method, self._phase, self._layout, problem, overlap)
        for schedule in schedules:
            self._walk(schedule)
        for rows in schedules[-1].results.values():
            array = schedules[-1].arrays[rows.array]
            if array.role == "buffer":  # the caller gets copies
                n = Tokens(schedules[-1]).of(rows) * sum(array_bytes(self._group, array))
                spend("other", self._copying(n))
        return self._clock.parts

    def _walk(self, schedule: Schedule) -> None:
        links, spend, tokens = self._links, self._clock.spend, Tokens(schedule)
        sizes = {name: array_bytes(self._group, x) for name, x in schedule.arrays.items()}
        known: dict[tuple, np.ndarray] = {}

        def nbytes(rows: Rows) -> np.ndarray | float:
            n, kind = tokens.of(rows), schedule.arrays[rows.array].kind
            key = identity(n), kind, schedule.arrays[rows.array].wide
            if key not in known:  # equal ones are the same object, which links look at once
                known[key] = n * sum(sizes[rows.array])
            return known[key]

        messages = [x for x in schedule.steps if isinstance(x, Message)]
        links.begin(schedule, {x: nbytes(x.rows) for x in messages})
        self._kernel.begin(schedule, tokens)
        merges = iter(merged_at_once(schedule))
        unsorted = set() if self._in_order else sorted_arrays(schedule)
        turns = _turns(schedule)
        folds = {x for x in unsorted if schedule.arrays[x].kind == "dkv"}
        for step in schedule.steps:
            if isinstance(step, Message | Merge) and step.rows.array in folds:
                # Gradients of several owners are in the order of tokens; owners get theirs.
                folds.remove(step.rows.array)
                spend("merge", self._copying(nbytes(Rows(step.rows.array))))
            if isinstance(step, Message):
                links.post(step, len(sizes[step.rows.array]))
                if step in turns:
                    links.depart()
                    spend("other", self._machine.turn / self._machine.share)
            elif isinstance(step, Wait):
                links.wait(step.messages)
            elif isinstance(step, Attend):
                links.depart()
                if step.keys.owner is None and step.keys.array in unsorted:
                    unsorted.remove(step.keys.array)
                    spend("merge", self._copying(nbytes(step.keys)))
                spend("compute", self._kernel.seconds(step))
                spend("other", self._machine.step / self._machine.share)
                if next(merges):
                    spend("merge", self._merging(tokens.of(step.into)))
            elif isinstance(step, Merge):
                links.depart()
                if self._phase == "forward":
                    spend("merge", self._merging(tokens.of(step.rows)))
                else:
                    spend("merge", self._copying(nbytes(step.rows)))
            elif isinstance(step, Copy | Zero):
                spend("other", self._copying(nbytes(step.rows)))
        links.finish()

    def _copying(self, nbytes: np.ndarray | float) -> np.ndarray | float:
        """Seconds to copy, or to add, so many bytes."""
        return nbytes / self._machine.copy / self._machine.share

    def _merging(self, tokens: np.ndarray | float) -> np.ndarray | float:
        """Seconds to merge a partial out."""
        seconds = tokens * self._group.nbytes("dq", wide=True) / self._machine.merge
        return seconds / self._machine.share


def _turns(schedule: Schedule) -> set[Message]:
    """Messages that make a rank keep step with its peers: it waits until they have left.

    And does no more than one kernel call meanwhile.
    """
    found, calls, posted = set(), 0, {}
    for step in schedule.steps:
        if isinstance(step, Attend):
            calls += 1
        elif isinstance(step, Message):
            posted[step] = calls
        elif isinstance(step, Wait):
            found |= {x for x in step.messages if x.sent and posted[x] >= calls - 1}
    return found


class _KernelCalls:
    """Seconds of kernel calls on shards of a context group, by rank.

    Parameters
    ----------
    kernel : KernelModel
    share : float
        Of a core that a rank has.
    mask : Mask
    shards : Distribution
        Of the ranks of the context group.
    group : AttentionConfig
    phase : str
    """

    def __init__(
        self,
        kernel: KernelModel,
        share: float,
        mask: Mask,
        shards: Distribution,
        group: AttentionConfig,
        phase: str,
    ) -> None:
        self._heads = group.nheads, group.nheads_kv, group.headdim
        self._kernel, self._share, self._back = kernel, share, phase == "backward"
        self._area, self._cut = visible_pairs(mask, shards)
        self._pair = _pair_seconds(kernel, mask, shards, self._heads, self._back, share)

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
        return found / self._share

    def _owner(self, rows: Rows) -> np.ndarray | None:
        """The one whose tokens they are; None: there are several."""
        owners = self._schedule.arrays[rows.array].owners
        if rows.owner is None and len(owners) == 1:
            return owners[0]
        return rows.owner

    def _part(self, rows: Rows) -> float:
        """The share of the owner's tokens that these are, about."""
        if isinstance(rows.part, str):
            return {FIRST: FIRST_SHARE, REST: 1 - FIRST_SHARE}[rows.part]
        if rows.part is None:
            return 1.0
        return 1 / len(self._schedule.sizes.chunks(rows.owner, rows.part[1]))

    def _summed(self, array: str, of_keys: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Areas and cut queries with all rows of an array, by set of owners, and each rank's set.

        (shards, sets) for arrays of keys, (sets, shards) for those of queries.
        """
        key = array, of_keys
        if key not in self._sums:
            owners = np.array(self._schedule.arrays[array].owners)  # (owners, P)
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


@lru_cache(maxsize=2)  # both phases of layouts that differ in shape only
def _pair_seconds(
    kernel: KernelModel,
    mask: Mask,
    shards: Distribution,
    heads: tuple[int, int, int],
    backward: bool,
    share: float,
) -> np.ndarray:
    """Of the kernel for queries of one shard and keys of another, by share of a core."""
    area, cut = visible_pairs(mask, shards)
    counts = np.array(shards.counts)
    found = np.empty(area.shape)
    for rows in by_rows(shards.nshards):
        sizes = area[rows], counts[rows, None], counts[None, :], cut[rows]
        found[rows] = kernel.seconds(*sizes, heads, backward) / share
    return found
