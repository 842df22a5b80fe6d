"""Seconds that a method takes on a machine: its schedules, step by step.

All ranks set out together.  Each does the steps of its schedule and waits for what is not there
yet: kernel calls by the machine's kernel (`a2d_mpi.planning.calls`), messages by its links
(`a2d_mpi.planning.clock` for all ranks at once, `a2d_mpi.planning.events` for ranks whose
schedules differ), copies and merges by the bytes that they touch.  What a
transfer takes from the core of its receiver is the link's ``1 - hidden``.  This module does not
import MPI and knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from a2d_mpi.core.problem import Problem, Workload
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.calls import KernelCalls, SingleCalls
from a2d_mpi.planning.clock import Clock, Links, Spans
from a2d_mpi.planning.events import Events, Program
from a2d_mpi.planning.machine import Machine
from a2d_mpi.schedules import METHODS, distribution_of, problem_of, write_all
from a2d_mpi.schedules.accounts import array_bytes, merged_at_once, tokens_of
from a2d_mpi.schedules.places import sorted_arrays
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import identity
from a2d_mpi.schedules.steps import Attend, Copy, Merge, Message, Rows, Wait, Zero


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


def slowest_seconds(phases: Mapping[str, Phase]) -> float:
    """Seconds of the slowest rank, phase by phase."""
    return sum(float(phase.total.max()) for phase in phases.values())


def predict(
    machine: Machine,
    method: str,
    layout: Layout,
    work: Workload,
    distribution: str | None = None,
    spans: dict[str, list[Spans]] | None = None,
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
        Gets, by phase and rank, the part, the begin and the end of all that a rank does, in
        order; seconds since the phase began.

    Raises
    ------
    ValueError
        If the heads do not fit the layout, or the machine has no kernel for the dtype.
    """
    name = distribution or distribution_of(method, work.mask)
    found = {}
    for phase in work.phases:
        trace = None if spans is None else [[] for _ in range(layout.size)]
        problem = problem_of(method, layout, work, work.mask, name)
        found[phase] = Phase(**Walk(machine, layout, work, problem, phase).predict(method, trace))
        if spans is not None:
            spans[phase] = trace
    return found


class Walk:
    """All that the ranks do in one phase, one step after the other."""

    def __init__(
        self, machine: Machine, layout: Layout, work: Workload, problem: Problem, phase: str
    ) -> None:
        self._machine, self._phase, self._layout, self._work = machine, phase, layout, work
        self._problem, self._inside = problem, problem.context_group(layout.heads)
        self._group = self._inside.config
        self._in_order = problem.shards_kv.name == "contiguous"

    def predict(self, method: str, spans: list[Spans] | None) -> dict[str, np.ndarray]:
        """Put the whole phase on the clock; returns the seconds of each part."""
        places = self._machine, self._layout
        clock, events = Clock(self._layout.size, spans), Events(*places, spans)
        at_once = self.go(method, clock, Links(*places, clock), events)
        return clock.parts if at_once else events.run()

    def go(self, method: str, clock: Clock, links: Links, events: Events) -> bool:
        """Go through the schedules of all ranks at once, or give each a program of its own.

        Returns whether all went at once, on the clock and the links; else there are programs.
        """
        layout, work = self._layout, self._work
        chains = write_all(method, self._phase, layout, self._problem, work.overlap)
        model = self._machine.kernel(work.dtype, self._phase)
        of_calls = model, self._machine.share, self._inside, self._phase
        if at_once := len(chains) == 1 and METHODS[method].at_once:
            calls = KernelCalls(*of_calls)
            self._walk(chains[0], clock.spend, links, calls, np.array(self._problem.counts))
        else:
            calls = SingleCalls(*of_calls)
            for rank, chain in enumerate(chains):
                program = events.program(rank)
                self._walk(chain, program.spend, program, calls, self._problem.counts[rank])
        return at_once

    def _walk(
        self,
        chain: list[Schedule],
        spend: Callable,
        links: Links | Program,
        calls: KernelCalls | SingleCalls,
        own: np.ndarray | int,
    ) -> None:
        """Go through the schedules of all ranks at once, or of one, which owns so many tokens."""
        spend("other", self._machine.start)
        if self._phase == "backward":  # delta
            spend("compute", self._copying(2 * own * self._work.nbytes("q")))
        for schedule in chain:
            self._steps(schedule, spend, links, calls)
        for rows in chain[-1].results.values():
            array = chain[-1].arrays[rows.array]
            if array.role == "buffer":  # the caller gets copies
                n = tokens_of(chain[-1]).of(rows) * sum(array_bytes(self._group, array))
                spend("other", self._copying(n))

    def _steps(
        self,
        schedule: Schedule,
        spend: Callable,
        links: Links | Program,
        calls: KernelCalls | SingleCalls,
    ) -> None:
        tokens = tokens_of(schedule)
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
        calls.begin(schedule, tokens)
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
                    some = np.asarray(nbytes(step.rows)) > 0
                    spend("other", some * self._machine.turn / self._machine.share)
            elif isinstance(step, Wait):
                links.wait(step.messages)
            elif isinstance(step, Attend):
                links.depart()
                if step.keys.owner is None and step.keys.array in unsorted:
                    unsorted.remove(step.keys.array)
                    spend("merge", self._copying(nbytes(Rows(step.keys.array))))
                spend("compute", calls.seconds(step))
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
