"""A candidate of the planner: a plan with bounds of its time that are refined step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.layout import Layout
from a2d_mpi.core.sizes import flops
from a2d_mpi.planning import cost
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import Needs, peak_memory, peak_of
from a2d_mpi.planning.model import Phase, simulated
from a2d_mpi.planning.simulator import PARTS, WAIT
from a2d_mpi.planning.survey import Survey, survey_of
from a2d_mpi.planning.workload import Layers, Workload
from a2d_mpi.schedules.method import METHODS
from a2d_mpi.schedules.writing import default_distribution, leaves_open, problem_of
from a2d_mpi.sharding.choice import CHOICES

SLICES = 2, 4, 8  # numbers of slices that the fastest plans try
ROOMY = 4, 8, 16, 32  # numbers of slices that plans try if memory does not suffice
GAIN = 0.99  # more slices must take less than this share of the seconds

Job = tuple[int, str]  # a kind of layers, by its number, and a phase


class Candidate:
    """One method and grid for all layers of a model: its time is refined step by step.

    Bytes and seconds are of all layers, and the memory is of the plans for all kinds of layers.

    Parameters
    ----------
    machine : Machine
    method : str
        One of `a2d_mpi.schedules.method.METHODS`.
    layout : Layout
        Layers of several kinds need one with a distribution.
    layers : sequence of (int, Workload)
        The number of layers of each kind, and their workload.

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

    def __init__(self, machine: Machine, method: str, layout: Layout, layers: Layers) -> None:
        self.method, self.layout, self._machine, self._layers = method, layout, machine, layers
        self._work = layers[0][1]  # all kinds differ only in their masks
        self._chooses = layout.positions > 1 and leaves_open(
            method, layout, self._work, self._work.mask
        )
        self.memory = self.received = self.crossing = 0
        self.over_bound = math.nan
        # What follows is of one layer, by its kind and the phase.
        self._jobs = [(i, x) for i in range(len(layers)) for x in self._work.phases]
        self._phases: dict[Job, Phase] = {}  # those that were simulated
        self._needs: dict[Job, list[list[Needs]]] = {}  # memory by rank and program
        self._moved: dict[Job, np.ndarray] = {}  # bytes: received, crossing by node
        self._seconds = {
            (i, x): _floor(machine, layout.size, layers[i][1], x) for i, x in self._jobs
        }
        self.bound = self._total(self._seconds)
        self._stages = self._refinements()

    @property
    def fits(self) -> bool:
        """True if the memory suffices."""
        return self.memory <= self._machine.room

    @property
    def was_simulated(self) -> bool:
        """True if all phases were simulated."""
        return len(self._phases) == len(self._jobs)

    @property
    def seconds(self) -> float:
        """Seconds of the slowest ranks, summed over the phases; inf if it was not simulated."""
        return self._slowest(self._phases) if self.was_simulated else math.inf

    @property
    def split(self) -> dict[str, float]:
        """Seconds of each part on the slowest ranks; they add up to `seconds`."""
        slowest = {job: int(phase.total.argmax()) for job, phase in self._phases.items()}
        return {
            part: self._total({x: getattr(self._phases[x], part)[i] for x, i in slowest.items()})
            for part in PARTS
        }

    def redistributed(self) -> list[Candidate]:
        """Return the same plan with all other distributions, if none was asked for; only once."""
        if not self._chooses:
            return []
        self._chooses = False
        others = [x for x in CHOICES if x != self.layout.distribution]
        layouts = [replace(self.layout, distribution=x) for x in others]
        return [Candidate(self._machine, self.method, x, self._layers) for x in layouts]

    def refine(self) -> bool:
        """Raise the bound or simulate a phase; return False if nothing is left to do."""
        more = next(self._stages, False)
        self.bound = self._total(self._seconds)
        return more

    def _total(self, of_jobs: Mapping[Job, float]) -> float:
        """Sum numbers of one layer over all layers and phases."""
        return float(sum(self._layers[i][0] * x for (i, _), x in of_jobs.items()))

    def _slowest(self, phases: Mapping[Job, Phase]) -> float:
        """Return the seconds of the slowest rank of each phase, summed."""
        return self._total({job: phase.total.max() for job, phase in phases.items()})

    def _refinements(self) -> Iterator[bool]:
        """Refine the candidate in stages; yield True after each.

        See `a2d_mpi.planning.planner`.
        """
        # Not earlier: a balanced distribution is a search.
        if self._chooses:
            self.layout = replace(self.layout, distribution=self._fastest_distribution())
        self._problems = [
            problem_of(self.method, self.layout, work, work.seen) for _, work in self._layers
        ]
        for job in self._jobs:
            survey = self._survey(job, self.layout, (0,))
            alone = _alone(self._machine, self.layout, survey, 0)
            self._seconds[job] = max(self._seconds[job], alone)
            self._needs[job] = survey.needs
            self._sum_memory()
            self._make_room((0,))
            yield True
        simulations = self._jobs[::-1]
        for job in simulations:
            self._simulate(job)
            yield True
        if self._make_room(range(self.layout.size)):
            for job in simulations:
                self._simulate(job)

    def _fastest_distribution(self) -> str:
        """Return the distribution that is fastest by a formula."""
        machine, layout, work = self._machine, self.layout, self._work
        far = layout.size > machine.ranks_per_node
        kernel, link = machine.kernel(work.dtype, PHASES[0]), machine.links(layout.size)[far]
        speed = kernel.flops * machine.share / link.bandwidth
        return default_distribution(self.method, layout, work, work.seen, speed)[0]

    def _survey(self, job: Job, layout: Layout, ranks: tuple[int, ...] | None = None) -> Survey:
        (i, phase), (machine, method) = job, (self._machine, self.method)
        work, problem = self._layers[i][1], self._problems[i]
        return survey_of(machine, method, layout, work, problem, phase, ranks)

    def _make_room(self, ranks: Sequence[int]) -> bool:
        """Try more slices of the heads if the memory of these ranks does not suffice."""
        backward, kernel = len(self._work.phases) > 1, self._machine.host_kernel(self._work.dtype)
        for layout in () if self.fits else self.sliced(ROOMY):
            memory = sum(
                max(peak_memory(self.method, layout, x, rank, backward, kernel) for rank in ranks)
                for x in self._problems
            )
            if memory <= self._machine.room:
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
                before = {job: x for job, x in fastest.items() if job[1] == phase}
                predicted = {
                    x: simulated(self._machine, layout, self._survey(x, layout)) for x in before
                }
                if self._slowest(predicted) < GAIN * self._slowest(before):
                    fastest, gains = fastest | predicted, True
                    numbers[phase] = layout.slices[0]
            if not gains:
                break
        used = tuple(numbers.values()) * (2 if len(numbers) == 1 else 1)
        self.layout, self._phases = replace(whole, slices=used), fastest
        if max(used) == 1:
            return
        for job in self._jobs:
            self._needs[job] = self._survey(job, self.layout).needs
        self._sum_memory()
        if not self.fits:  # two slices need more memory than one
            self.layout, self._phases, self.memory = whole, phases, memory
        self.bound = self.seconds

    def _simulate(self, job: Job) -> None:
        """Simulate a phase of a kind of layers; count its bytes."""
        machine, layout, survey = self._machine, self.layout, self._survey(job, self.layout)
        self._phases[job] = simulated(machine, layout, survey)
        self._seconds[job] = float(self._phases[job].total.max())
        self._needs[job] = survey.needs
        messages, node = survey.messages, machine.node_of(layout)
        far = node[messages.source] != node[messages.to]
        self._moved[job] = self._layers[job[0]][0] * np.stack([
            np.bincount(messages.to, messages.nbytes, layout.size),
            np.bincount(node[messages.to], messages.nbytes * far, layout.size),
        ])  # fmt: skip
        if self.was_simulated:
            self._sum_memory()
            moved = sum(self._moved.values())
            self.received, self.crossing = moved.max(axis=1).astype(np.int64).tolist()
            # The lower bound is for ranks with equal areas and tokens.
            areas = [x.seen.area / layout.size for x in self._problems]
            tokens = self._work.seqlen / layout.size
            least = self._total({
                (i, x): cost.lower_bound(self._problems[i], areas[i], tokens, x == PHASES[1])
                for i, x in self._jobs
            })  # fmt: skip
            self.over_bound = moved[0].sum() / (layout.size * least) if least else math.inf

    def _sum_memory(self) -> None:
        """Set the memory of the ranks whose programs were read, in all phases so far."""
        kernel, self.memory = self._machine.host_kernel(self._work.dtype), 0
        for i, problem in enumerate(self._problems):
            phases = zip(*(x for (kind, _), x in self._needs.items() if kind == i))
            of_ranks = (peak_of(x, problem, p, kernel) for p, x in enumerate(phases))
            self.memory += max(of_ranks, default=0)


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
