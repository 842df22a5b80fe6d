"""A candidate of the planner: a plan with bounds of its time that are refined step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.layout import Layout
from a2d_mpi.core.sizes import flops
from a2d_mpi.planning import cost
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import Needs, peak_memory, peak_of
from a2d_mpi.planning.model import Phase, simulated, slowest_seconds
from a2d_mpi.planning.simulator import PARTS, WAIT
from a2d_mpi.planning.survey import Survey, survey_of
from a2d_mpi.planning.workload import Layers, Workload
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.writing import default_distribution, leaves_open, problem_of
from a2d_mpi.sharding.choice import CHOICES

SLICES = 2, 4, 8  # numbers of slices that the fastest plans try
ROOMY = 4, 8, 16, 32  # numbers of slices that plans try if memory does not suffice
GAIN = 0.99  # more slices must take less than this share of the seconds


class Candidate:
    """One way to compute, and what it costs: its time is refined step by step.

    Parameters
    ----------
    machine : Machine
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    layout : Layout
    work : Workload
    room : int or None
        Bytes that a rank has for the plan; None: no limit.

    Attributes
    ----------
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    layout : Layout
        With the distribution and the slices that were chosen.
    bound : float
        Lower bound of the seconds of one slice of the heads; the predicted seconds once all phases
        are simulated.
    memory : int
        Peak bytes of any rank.  If the candidate was not simulated, only rank 0 counts.
    received, crossing : int
        Bytes that the busiest rank receives, and that the busiest node receives from other nodes;
        0 if the candidate was not simulated.
    over_bound : float
        Bytes that all ranks receive, divided by `a2d_mpi.planning.cost.lower_bound`, the least
        bytes of exact attention without a head axis.  It can be below 1 with a head axis.  inf on
        one rank, NaN if the candidate was not simulated.
    """

    def __init__(
        self, machine: Machine, method: str, layout: Layout, work: Workload, room: int | None
    ) -> None:
        self.method, self.layout = method, layout
        self._machine, self._work, self._room = machine, work, room
        self._chooses = layout.positions > 1 and leaves_open(method, layout, work, work.mask)
        self.memory = self.received = self.crossing = 0
        self.over_bound = math.nan
        self._phases: dict[str, Phase] = {}  # those that were simulated
        self._needs: dict[str, list[list[Needs]]] = {}  # memory by phase, rank and program
        self._moved: dict[str, np.ndarray] = {}  # bytes by phase: received, crossing by node
        self._seconds = {x: _floor(machine, layout.size, work, x) for x in work.phases}
        self.bound = sum(self._seconds.values())
        self._stages = self._refinements()

    @property
    def fits(self) -> bool:
        """True if the memory suffices."""
        return self._room is None or self.memory <= self._room

    @property
    def phases(self) -> dict[str, Phase]:
        """Seconds of every rank by phase; empty if not all phases were simulated."""
        phases = self._work.phases
        return {x: self._phases[x] for x in phases} if len(self._phases) == len(phases) else {}

    @property
    def seconds(self) -> float:
        """Seconds of the slowest ranks, summed over the phases; inf if it was not simulated."""
        return slowest_seconds(self.phases) if self.phases else math.inf

    @property
    def split(self) -> dict[str, float]:
        """Seconds of each part on the slowest ranks; they add up to `seconds`."""
        slowest = [(phase, int(phase.total.argmax())) for phase in self.phases.values()]
        return {x: sum(float(getattr(phase, x)[i]) for phase, i in slowest) for x in PARTS}

    def redistributed(self) -> list[Candidate]:
        """Return the same plan with all other distributions, if none was asked for; only once."""
        if not self._chooses:
            return []
        self._chooses = False
        others = [x for x in CHOICES if x != self.layout.distribution]
        layouts = [replace(self.layout, distribution=x) for x in others]
        return [Candidate(self._machine, self.method, x, self._work, self._room) for x in layouts]

    def refine(self) -> bool:
        """Raise the bound or simulate a phase; return False if nothing is left to do."""
        more = next(self._stages, False)
        self.bound = sum(self._seconds.values())
        return more

    def _refinements(self) -> Iterator[bool]:
        """Refine the candidate in stages; yield True after each.

        See `a2d_mpi.planning.planner`.
        """
        # Not earlier: a balanced distribution is a search.
        if self._chooses:
            self.layout = replace(self.layout, distribution=self._fastest_distribution())
        self._problem = problem_of(self.method, self.layout, self._work, self._work.seen)
        for phase in self._work.phases:
            survey = self._survey(phase, self.layout, (0,))
            alone = _alone(self._machine, self.layout, survey, 0)
            self._seconds[phase] = max(self._seconds[phase], alone)
            self._needs[phase] = survey.needs
            self._sum_memory()
            self._make_room((0,))
            yield True
        simulations = self._work.phases[::-1]
        for phase in simulations:
            self._simulate(phase)
            yield True
        if self._make_room(range(self.layout.size)):
            for phase in simulations:
                self._simulate(phase)

    def _fastest_distribution(self) -> str:
        """Return the distribution that is fastest by a formula."""
        machine, layout, work = self._machine, self.layout, self._work
        far = layout.size > machine.ranks_per_node
        kernel, link = machine.kernel(work.dtype, PHASES[0]), machine.links(layout.size)[far]
        speed = kernel.flops * machine.share / link.bandwidth
        return default_distribution(self.method, layout, work, work.seen, speed)[0]

    def _survey(self, phase: str, layout: Layout, ranks: tuple[int, ...] | None = None) -> Survey:
        of = self._machine, self.method, layout, self._work, self._problem
        return survey_of(*of, phase, ranks)

    def _make_room(self, ranks: Sequence[int]) -> bool:
        """Try more slices of the heads if the memory of these ranks does not suffice."""
        backward, kernel = len(self._work.phases) > 1, self._machine.host_kernel(self._work.dtype)
        for layout in () if self.fits else self.sliced(ROOMY):
            of = self.method, layout, self._problem
            memory = max(peak_memory(*of, rank, backward, kernel) for rank in ranks)
            if memory <= self._room:
                self.layout, self.memory = layout, memory
                return True
        return False

    def sliced(self, numbers: Sequence[int]) -> Iterator[Layout]:
        """Yield the layout with these numbers of slices, as far as the KV heads allow."""
        own = self._work.cp_group(self.layout.heads)
        for number in numbers:
            if own.nheads_kv % number == 0:
                yield replace(self.layout, slices=(number, number))

    def slice_heads(self) -> None:
        """Take the fastest number of slices in each phase, of a plan that was simulated."""
        whole, phases, memory = self.layout, self._phases, self.memory
        one_slice = METHODS[self.method].ring and whole.heads == 1
        if whole.slices or whole.size == 1 or one_slice:
            return
        numbers, fastest = dict.fromkeys(self._work.phases, 1), dict(phases)
        for layout in self.sliced(SLICES):
            gains = False
            for phase in numbers:
                predicted = simulated(self._machine, layout, self._survey(phase, layout))
                if predicted.total.max() < GAIN * fastest[phase].total.max():
                    fastest[phase], gains = predicted, True
                    numbers[phase] = layout.slices[0]
            if not gains:
                break
        used = tuple(numbers.values()) * (2 if len(numbers) == 1 else 1)
        self.layout, self._phases = replace(whole, slices=used), fastest
        if max(used) == 1:
            return
        for phase in numbers:
            self._needs[phase] = self._survey(phase, self.layout).needs
        self._sum_memory()
        if not self.fits:  # two slices need more memory than one
            self.layout, self._phases, self.memory = whole, phases, memory
        self.bound = self.seconds

    def _simulate(self, phase: str) -> None:
        """Simulate a phase; count its bytes."""
        machine, layout, survey = self._machine, self.layout, self._survey(phase, self.layout)
        self._phases[phase] = simulated(machine, layout, survey)
        self._seconds[phase] = float(self._phases[phase].total.max())
        self._needs[phase] = survey.needs
        messages, node = survey.messages, machine.node_of(layout)
        far = node[messages.source] != node[messages.to]
        self._moved[phase] = np.stack([
            np.bincount(messages.to, messages.nbytes, layout.size),
            np.bincount(node[messages.to], messages.nbytes * far, layout.size),
        ])  # fmt: skip
        if self.phases:
            self._sum_memory()
            moved = sum(self._moved.values())
            self.received, self.crossing = moved.max(axis=1).astype(np.int64).tolist()
            self.over_bound = _over_bound(moved[0].sum(), layout, self._work, self._problem)

    def _sum_memory(self) -> None:
        """Set the memory of the ranks whose programs were read, in all phases so far."""
        kernel = self._machine.host_kernel(self._work.dtype)
        phases = zip(*(self._needs[x] for x in self._work.phases if x in self._needs))
        self.memory = max(peak_of(x, self._problem, p, kernel) for p, x in enumerate(phases))


class Stack:
    """One method and grid for all layers of a model: a `Candidate` for each kind of layer.

    It is used as a `Candidate`.  Bytes and seconds are of all layers, and the memory is of the
    plans of all kinds.  With several kinds all plans get the same slices, and `over_bound` is NaN.

    Parameters
    ----------
    machine, method, layout, room
        As of a `Candidate`.
    layers : sequence of (int, Workload)
        The number of layers of each kind, and their workload.
    """

    def __init__(
        self, machine: Machine, method: str, layout: Layout, layers: Layers, room: int | None
    ) -> None:
        self.method, self._room = method, room
        self._parts = [(n, Candidate(machine, method, layout, x, room)) for n, x in layers]
        self._like_this = lambda layout: Stack(machine, method, layout, layers, room)
        self._add_up()

    def _add_up(self) -> None:
        """Set the attributes from those of the parts."""
        parts, (_, first) = self._parts, self._parts[0]
        self.layout = first.layout
        self.phases = all(x.phases for _, x in parts)  # whether all were simulated
        self.bound = sum(n * x.bound for n, x in parts)
        self.seconds = sum(n * x.seconds for n, x in parts)
        self.split = {name: sum(n * x.split[name] for n, x in parts) for name in PARTS}
        self.received = sum(n * x.received for n, x in parts)
        self.crossing = sum(n * x.crossing for n, x in parts)
        self.over_bound = first.over_bound if len(parts) == 1 else math.nan
        self.memory = sum(x.memory for _, x in parts)
        self.fits = self._room is None or self.memory <= self._room

    def refine(self) -> bool:
        """Refine a part, the first one first; return False if nothing is left to do."""
        more = any(x.refine() for _, x in self._parts)  # it stops at a part that was refined
        self._add_up()
        return more

    def redistributed(self) -> list[Stack]:
        """As of a `Candidate`, if there is one kind of layer; several are given a distribution."""
        return [self._like_this(x.layout) for x in self._parts[0][1].redistributed()]

    def slice_heads(self) -> None:
        """Take the fastest number of slices, of a plan that was simulated."""
        (_, first), *others = self._parts
        if not others:
            first.slice_heads()
        for layout in first.sliced(SLICES) if others else ():
            sliced = self._like_this(layout)
            while sliced.refine():
                pass
            if not sliced.fits or sliced.seconds >= GAIN * self.seconds:
                break
            self._parts, self.seconds = sliced._parts, sliced.seconds
        self._add_up()


def _floor(machine: Machine, ranks: int, work: Workload, phase: str) -> float:
    """Return the seconds of the flops of a phase, divided evenly among the ranks."""
    kernel = machine.kernel(work.dtype, phase)
    backward = phase == PHASES[1]
    operations = flops(work.seen.area, work.nheads, work.headdim, backward, work.headdim_v)
    return operations / ranks / kernel.flops / machine.share


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


def _over_bound(received: float, layout: Layout, work: Workload, problem: Problem) -> float:
    """Divide the received bytes by the lower bound for ranks with equal areas and tokens."""
    area = problem.seen.area / layout.size
    least = sum(
        cost.lower_bound(problem, area, work.seqlen / layout.size, phase == "backward")
        for phase in work.phases
    )
    return received / (layout.size * least) if least else float("inf")
