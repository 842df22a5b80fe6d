"""A candidate of the planner, and its trial: bounds of its time that are refined step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import Layout, flops, misfit
from a2d_mpi.masks.mask import Mask
from a2d_mpi.planning import cost
from a2d_mpi.planning.layouts import known_as
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import Held, peak_memory, peak_of
from a2d_mpi.planning.model import Phase, simulated, slowest_seconds
from a2d_mpi.planning.simulator import PARTS, WAIT
from a2d_mpi.planning.survey import Survey, survey_of
from a2d_mpi.planning.workload import Workload
from a2d_mpi.schedules import (
    METHODS,
    default_distribution,
    leaves_open,
    problem_of,
)
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.slices import sharing
from a2d_mpi.sharding.choice import CHOICES
from a2d_mpi.sharding.pairs import pairs_of_runs

SLICES = 2, 4, 8  # numbers of slices that the fastest plans try
ROOMY = 4, 8, 16, 32  # numbers of slices that plans try if memory does not suffice
GAIN = 0.99  # more slices must take less than this share of the seconds
# Steps of a rank for its first bound: writing the whole ring of 4096 ranks takes seconds.
FIRST_STEPS = 600


@dataclass(frozen=True)
class Candidate:
    """One way to compute, and what it costs.

    Attributes
    ----------
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    layout : Layout
    distribution : str
    bound : float
        Lower bound of the seconds.
    memory : int
        Peak bytes of any rank.  If the candidate was not simulated, only rank 0 counts.
    fits : bool
        Whether the memory suffices.
    phases : dict of str to Phase
        Seconds of every rank; empty if the candidate was not simulated.
    received, crossing : int
        Bytes that the busiest rank receives, and that the busiest node receives from other nodes;
        0 if the candidate was not simulated.
    messages : int
        MPI messages that the busiest rank receives, likewise.
    over_bound : float
        Bytes that all ranks receive, divided by `a2d_mpi.planning.cost.lower_bound`, the least
        bytes of exact attention without a head axis.  It can be below 1 with a head axis.  inf on
        one rank, NaN if the candidate was not simulated.
    """

    method: str
    layout: Layout
    distribution: str
    bound: float
    memory: int
    fits: bool
    phases: dict[str, Phase] = field(default_factory=dict)
    received: int = 0
    crossing: int = 0
    messages: int = 0
    over_bound: float = math.nan

    @property
    def seconds(self) -> float:
        """Seconds of the slowest ranks, summed over the phases; inf if it was not simulated."""
        return slowest_seconds(self.phases) if self.phases else math.inf

    @property
    def split(self) -> dict[str, float]:
        """Seconds of each part on the slowest ranks; they add up to `seconds`."""
        slowest = [(phase, int(phase.total.argmax())) for phase in self.phases.values()]
        return {x: sum(float(getattr(phase, x)[i]) for phase, i in slowest) for x in PARTS}

    @property
    def known_as(self) -> str:
        """Common name of this method on this layout, as in papers; empty if there is none."""
        return known_as(self.method, self.layout)


class Trial:
    """One plan during the search: its bound is refined step by step.

    Parameters
    ----------
    machine, method, layout, work, room
        As in `a2d_mpi.planning.planner.candidate`.

    Attributes
    ----------
    seconds : float
        Lower bound of the seconds; the predicted seconds once all phases are simulated.
    bound : float
        Lower bound of the seconds before any phase was simulated.
    memory : int
        Peak bytes of the ranks whose programs were read so far; of all ranks once all phases are
        simulated.
    fits : bool
        Whether `memory` suffices.
    phases : dict of str to Phase
        Predicted seconds of every rank in the phases that were simulated.
    """

    def __init__(
        self, machine: Machine, method: str, layout: Layout, work: Workload, room: int | None
    ) -> None:
        self._machine, self._method, self._given = machine, method, layout
        self._work, self._room = work, room
        self._chooses = layout.positions > 1 and leaves_open(method, layout, work, work.mask)
        self.memory, self.fits = 0, True
        self.phases: dict[str, Phase] = {}
        self._held: dict[str, list[list[Held]]] = {}  # memory by phase, rank and program
        self._sums = np.zeros((3, layout.size))  # received, crossing by node, MPI messages
        self._seconds = {x: _floor(machine, layout.size, work, x) for x in work.phases}
        self.bound = self.seconds = sum(self._seconds.values())
        self._stages = self._refinements()

    # Layout and problem are made when they are needed: a balanced distribution is a search.
    @cached_property
    def _layout(self) -> Layout:
        """The layout with the distribution that is fastest by a formula."""
        layout, work = self._given, self._work
        if not self._chooses:
            return layout
        machine, far = self._machine, layout.size > self._machine.ranks_per_node
        kernel, link = machine.kernel(work.dtype, PHASES[0]), machine.links(layout.size)[far]
        speed = kernel.flops * machine.share / link.bandwidth
        name, _ = default_distribution(self._method, layout, work, work.mask, speed)
        return replace(layout, distribution=name)

    @property
    def _plan(self) -> tuple[Machine, str, Layout, Workload]:
        return self._machine, self._method, self._layout, self._work

    @cached_property
    def _problem(self) -> Problem:
        return problem_of(self._method, self._layout, self._work, self._work.mask)

    def redistributed(self) -> list[Trial]:
        """Return the same plan with all other distributions, if none was asked for; only once."""
        if not self._chooses:
            return []
        self._chooses = False
        machine, method, layout, work = self._plan
        others = (replace(layout, distribution=x) for x in CHOICES if x != layout.distribution)
        return [Trial(machine, method, x, work, self._room) for x in others]

    def refine(self) -> bool:
        """Raise the bound or simulate a phase; return False if nothing is left to do."""
        more = next(self._stages, False)
        self.seconds = sum(self._seconds.values())
        if not self.phases:
            self.bound = self.seconds
        return more

    def _refinements(self) -> Iterator[bool]:
        """Refine the trial in stages; yield True after each.

        See `a2d_mpi.planning.planner`.
        """
        for phase, steps in zip(self._work.phases, (FIRST_STEPS, None)):
            self._bound(phase, steps)
            self._make_room((0,))
            yield True
        for phase in reversed(self._work.phases):
            self._simulate(phase)
            yield True
        if self._make_room(range(self._layout.size)):
            self._sums[:] = 0
            for phase in reversed(self._work.phases):
                self._simulate(phase)

    def _make_room(self, ranks: Sequence[int]) -> bool:
        """Try more slices of the heads if the memory of these ranks does not suffice."""
        for layout in () if self.fits else self._sliced(ROOMY):
            machine, method, _, work = self._plan
            kernel, backward = machine.host_kernel(work.dtype), len(work.phases) > 1
            of = method, layout, self._problem
            memory = max(peak_memory(*of, rank, backward, kernel) for rank in ranks)
            if memory <= self._room:
                self._layout, self.memory, self.fits = layout, memory, True
                return True
        return False

    def _sliced(self, numbers: Sequence[int]) -> Iterator[Layout]:
        """Yield the layout with these numbers of slices, as far as heads and method allow."""
        own = self._work.cp_group(self._layout.heads)
        for number in numbers:
            # Rings do not hold keys.
            refused = METHODS[self._method].is_ring(self._layout) and sharing(own, number) > 1
            if not refused and not misfit(own.nheads, own.nheads_kv, number):
                yield replace(self._layout, slices=(number, number))

    def slice_heads(self) -> None:
        """Take the fastest number of slices in each phase, of a plan that was simulated."""
        machine, method, whole, work = self._plan
        one_slice = METHODS[method].ring and whole.heads == 1
        if whole.slices or whole.size == 1 or one_slice:
            return
        numbers, before = dict.fromkeys(work.phases, 1), dict(self.phases)
        for layout in self._sliced(SLICES):
            gains = False
            for phase in work.phases:
                survey = survey_of(machine, method, layout, work, self._problem, phase)
                predicted = simulated(machine, layout, survey)
                if predicted.total.max() < GAIN * self.phases[phase].total.max():
                    self.phases[phase], gains = predicted, True
                    numbers[phase] = layout.slices[0]
            if not gains:
                break
        used = tuple(numbers.values()) * (2 if len(numbers) == 1 else 1)
        self._layout, memory = replace(whole, slices=used), self.memory
        if max(used) == 1:
            return
        for phase in work.phases:
            self._held[phase] = survey_of(*self._plan, self._problem, phase).held
        self._hold(range(whole.size))
        self._held = {}
        if not self.fits:  # two slices need more memory than one
            self._layout, self.phases, self.memory, self.fits = whole, before, memory, True
        self._seconds = {x: float(y.total.max()) for x, y in self.phases.items()}
        self.seconds = sum(self._seconds.values())

    def _bound(self, phase: str, steps: int | None) -> None:
        """Raise the bound of a phase to the time of rank 0 alone, for all or the first steps."""
        machine, _, layout, _ = self._plan
        survey = survey_of(*self._plan, self._problem, phase, (0,), steps)
        self._seconds[phase] = max(self._seconds[phase], _alone(machine, layout, survey, 0))
        self._held[phase] = survey.held
        self._hold((0,))

    def _simulate(self, phase: str) -> None:
        """Simulate a phase; add its bytes and messages to the sums."""
        machine, _, layout, _ = self._plan
        survey = survey_of(*self._plan, self._problem, phase)
        self.phases[phase] = simulated(machine, layout, survey)
        self._seconds[phase] = float(self.phases[phase].total.max())
        messages, node = survey.messages, machine.node_of(layout)
        far = node[messages.source] != node[messages.to]
        self._sums += [
            np.bincount(messages.to, messages.nbytes, layout.size),
            np.bincount(node[messages.to], messages.nbytes * far, layout.size),
            np.bincount(messages.to, survey.pieces, layout.size),
        ]
        self._held[phase] = survey.held
        if self.simulated:
            self._hold(range(layout.size))
            self._held = {}

    @property
    def simulated(self) -> bool:
        """True once all phases are simulated."""
        return len(self.phases) == len(self._work.phases)

    def candidate(self) -> Candidate:
        """Return the results so far."""
        method, work = self._method, self._work
        if not self.simulated:
            layout = vars(self).get("_layout", self._given)
            name = METHODS[method].distribution or layout.distribution
            name = name or work.mask.default_distribution
            return Candidate(method, layout, name, self.seconds, self.memory, self.fits)
        layout, name = self._layout, self._problem.queries.name
        received, crossing, messages = self._sums.max(axis=1).astype(np.int64).tolist()
        over = _over_bound(int(self._sums[0].sum()), layout, work, self._problem)
        return Candidate(
            method,
            layout,
            name,
            min(self.bound, self.seconds),
            self.memory,
            self.fits,
            phases={x: self.phases[x] for x in work.phases},
            received=received,
            crossing=crossing,
            messages=messages,
            over_bound=over,
        )

    def _hold(self, ranks: Sequence[int]) -> None:
        """Set the memory of these ranks from the phases that were surveyed."""
        kernel = self._plan[0].host_kernel(self._work.dtype)
        phases = zip(*(self._held[x] for x in self._work.phases if x in self._held))
        self.memory = max(peak_of(x, self._problem, p, kernel) for p, x in zip(ranks, phases))
        self.fits = self._room is None or self.memory <= self._room


def _floor(machine: Machine, ranks: int, work: Workload, phase: str) -> float:
    """Return the seconds of the flops of a phase, divided evenly among the ranks."""
    kernel = machine.kernel(work.dtype, phase)
    area = _area(work.mask.aligned(work.seqlen, work.seqlen_kv), work.seqlen, work.seqlen_kv)
    backward = phase == PHASES[1]
    operations = flops(area, work.nheads, work.headdim, backward, work.headdim_v)
    return operations / ranks / kernel.flops / machine.share


@lru_cache(maxsize=16)
def _area(mask: Mask, seqlen: int, seqlen_kv: int) -> int:
    """Count the visible pairs of a mask."""
    return int(pairs_of_runs(mask, [([range(seqlen)], [range(seqlen_kv)])])[0, 0])


def _alone(machine: Machine, layout: Layout, survey: Survey, rank: int) -> float:
    """Return the seconds of a rank whose peers are never late and whose links carry nothing else.

    A message starts at the earliest after the latest wait that left no message under way.
    """
    operations, messages = survey.operations, survey.messages
    node = machine.node_of(layout)
    far = node[messages.source] != node[messages.to]
    inside, between = machine.links(layout.size)
    port = between.bandwidth * max(1.0, between.nics / machine.ranks_per_node)
    passing = (messages.nbytes / np.where(far, port, inside.bandwidth)).tolist()
    latency = np.where(far, between.latency, inside.latency).tolist()
    link = (2 * far + (messages.to == rank)).tolist()
    now = since = idle = 0.0
    posted: dict[int, float] = {}
    carried: dict[int, float] = {}  # by link: end of the messages that the rank has waited for
    for kind, seconds, numbers in operations.of_rank(rank):
        if kind != WAIT:
            now += seconds
            posted.update(dict.fromkeys(numbers, now))
            continue
        ready = now
        for m in numbers:
            if m in posted:
                passed = carried[link[m]] = carried.get(link[m], since) + passing[m]
                ready = max(ready, max(passed, posted.pop(m) + passing[m]) + latency[m])
        idle += ready - now
        paid = min(idle, seconds)  # the core receives messages while the rank waits
        idle -= paid
        now = ready + seconds - paid
        if not posted:
            since, carried = now, {}
    return now


def _over_bound(received: int, layout: Layout, work: Workload, problem: Problem) -> float:
    """Divide the received bytes by the lower bound for ranks with equal areas and tokens."""
    area = _area(problem.mask, work.seqlen, work.seqlen_kv) / layout.size
    least = sum(
        cost.lower_bound(problem, area, work.seqlen / layout.size, phase == "backward")
        for phase in work.phases
    )
    return received / (layout.size * least) if least else float("inf")
