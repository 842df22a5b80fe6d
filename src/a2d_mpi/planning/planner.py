"""Search for the fastest method, grid and rank order on a machine; no MPI import.

Every candidate has a lower bound of its time.  The bound grows in four stages:

1. the computing of an average rank;
2. the first steps of one rank, which has its links for itself and never waits for late peers;
3. all steps of this rank, likewise;
4. a simulation of all ranks, one phase after the other.

The search always refines the candidate with the smallest bound.  It ends when a candidate that is
fully simulated has the smallest one.

A candidate can lead to others.  If a grid does not fit in memory, its streamed plan is tried.  If
the mask leaves the distribution open, a candidate first has the distribution that
`a2d_mpi.sharding.choice` takes for the machine.  If this candidate turns out to be the fastest, it
is tried with the other distributions, too.

Example::

    machine = read_machine("data/machines/h100-64x1.toml")
    work = Workload(1 << 20, nheads=96, headdim=128, mask=Causal(), backward=True)
    best = best_candidate(machine, 64, work)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import permutations, product

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import Layout, flops, misfit
from a2d_mpi.masks.mask import Mask
from a2d_mpi.planning import cost
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import peak_of
from a2d_mpi.planning.model import Phase, simulated, slowest_seconds
from a2d_mpi.planning.simulator import PARTS, WAIT
from a2d_mpi.planning.survey import Survey, survey_of
from a2d_mpi.schedules import METHODS, default_distribution, leaves_open, problem_of
from a2d_mpi.schedules.problem import Problem, Workload
from a2d_mpi.sharding.choice import CHOICES
from a2d_mpi.sharding.pairs import pairs_of_runs

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
        With `stream` if a plan without streaming does not fit in memory.
    distribution : str
    bound : float
        Lower bound of the seconds.
    memory : int
        Peak bytes of any rank.  If the candidate was not simulated: of the ranks looked at so far.
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
        return METHODS[self.method].known_as(self.layout)


def candidates(
    machine: Machine,
    ranks: int,
    work: Workload,
    memory: int | None = None,
    methods: Sequence[str] | None = None,
    progress: Callable[[Iterator], Iterable] = iter,
    idle: float = 0.0,
    number: int | None = 1,
) -> list[Candidate]:
    """Return all candidates for a number of ranks, in the order of their time.

    First come the candidates that were simulated and fit, fastest first.  Candidates that were not
    simulated follow, by their bounds.  Candidates that do not fit in memory come last.

    Parameters
    ----------
    machine : Machine
    ranks : int
        P; nodes are filled one after the other.
    work : Workload
    memory : int, optional
        Bytes of a rank.  Default: the memory of the machine's profile, and no limit if the profile
        has none.
    methods : sequence of str, optional
        Default: all of `a2d_mpi.schedules.METHODS`.
    progress : callable
        A progress bar: it takes an iterator and iterates over it, as ``tqdm`` does.
    idle : float
        Share of the ranks that may stay idle, for methods that need a certain number of ranks.
    number : int, optional
        The search ends when this many fastest candidates are certain.  None: simulate all.

    Raises
    ------
    ValueError
        If the machine has no kernel for the dtype.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    limit = memory if memory is not None else machine.memory
    room = None if limit is None else limit - machine.reserved
    shapes = [
        (method, layout)
        for method in (METHODS if methods is None else methods)
        for size in (ranks, *_fewer(method, ranks, work, idle))
        for layout in layouts(method, size, work, machine.ranks_per_node)
    ]
    # Layouts with the same programs follow each other, because few surveys are cached.
    shapes.sort(key=lambda x: (x[0], x[1].size, x[1].heads, x[1].rows, x[1].block))
    trials: list[Trial] = []
    for _ in progress(_search(trials, shapes, machine, work, room, number)):
        pass
    results = [x.candidate() for x in trials]
    return sorted(results, key=lambda x: (not x.fits, x.seconds, x.bound))


def _search(
    trials: list[Trial],
    shapes: Sequence[tuple[str, Layout]],
    machine: Machine,
    work: Workload,
    room: int | None,
    number: int | None,
) -> Iterator[None]:
    """Refine the candidate with the smallest bound, again and again; yield after each step."""
    for method, layout in shapes:
        trials.append(Trial(machine, method, layout, work, room))
        yield
    queue = [(x.seconds, i) for i, x in enumerate(trials) if x.fits]
    heapify(queue)
    while queue and number != 0:
        i = heappop(queue)[1]
        new = [i]
        if trials[i].refine():
            if not trials[i].fits:
                new = _appended(trials, trials[i].streamed())
        elif others := trials[i].redistributed():  # it is the fastest so far
            new += _appended(trials, others)
        elif number is not None:  # no bound of the others is below its time
            number -= 1
            continue
        else:
            continue
        for j in new:
            heappush(queue, (trials[j].seconds, j))
        yield


def _appended(trials: list[Trial], new: list[Trial]) -> list[int]:
    """Append new trials and return their indices."""
    trials += new
    return list(range(len(trials) - len(new), len(trials)))


def best_candidates(
    machine: Machine,
    ranks: int,
    work: Workload,
    number: int | None,
    memory: int | None = None,
    methods: Sequence[str] | None = None,
) -> list[Candidate]:
    """Return the fastest candidates that fit in memory, fastest first.

    Parameters
    ----------
    number : int or None
        Most candidates to return.  None: the fastest candidate of each method.
    machine, ranks, work, memory, methods
        As of `candidates`.

    Raises
    ------
    ValueError
        If there is no candidate or none fits.  The message has the least memory that one needs.
    """
    results = []
    for searched in [methods] if number is not None else [(x,) for x in methods or METHODS]:
        results += candidates(machine, ranks, work, memory, searched, number=number or 1)
    results.sort(key=lambda x: (not x.fits, x.seconds))
    if not results:
        raise ValueError(f"no plan for {ranks} ranks with {', '.join(methods or METHODS)}")
    if not results[0].fits:
        least = min(candidate.memory for candidate in results) + machine.reserved
        raise ValueError(f"no plan fits: the smallest needs at least {least} bytes a rank")
    fit = [x for x in results if x.fits and x.phases]
    if number is not None:
        return fit[:number]
    first: dict[str, Candidate] = {}
    for candidate in fit:
        first.setdefault(candidate.method, candidate)
    return list(first.values())


def best_candidate(
    machine: Machine,
    ranks: int,
    work: Workload,
    memory: int | None = None,
    methods: Sequence[str] | None = None,
) -> Candidate:
    """Return the fastest candidate that fits in memory; see `best_candidates`."""
    return best_candidates(machine, ranks, work, 1, memory, methods)[0]


def layouts(method: str, ranks: int, work: Workload, ranks_per_node: int) -> Iterator[Layout]:
    """Yield the layouts that suit a method, without layouts that must be equally fast.

    Parameters
    ----------
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    ranks : int
        Ranks of each layout.
    work : Workload
    ranks_per_node : int
        Consecutive world ranks on each node.
    """
    rules = METHODS[method]
    if rules.place:
        if work.mask.default_distribution != "balanced" or work.seqlen_kv != work.seqlen:
            return  # other methods are as good, and a placement takes seconds
    elif rules.distribution and work.mask.default_distribution == "contiguous":
        return  # for these masks it is the same as the method without its own distribution
    if not rules.takes(work.mask):
        return
    node, seen = np.arange(ranks) // ranks_per_node, set()
    for heads in _divisors(ranks):
        if misfit(work.nheads, work.nheads_kv, heads):
            continue
        positions = ranks // heads
        for rows in _divisors(positions):
            cols = positions // rows
            for order, block in (
                _node_blocks(rows, cols, heads, ranks_per_node)
                if rules.knows_nodes
                else product(map("".join, permutations("rcu")), [(1, 1)])
            ):
                layout = Layout(rows, cols, heads, order, block)
                # Layouts whose ranks share nodes in the same way are equally fast.
                placed = layout.on_nodes(node)
                if rules.knows_nodes:
                    layout = placed
                key = (rows, cols, heads, placed.nodes)
                if key not in seen and rules.suits(layout):
                    seen.add(key)
                    yield layout


def _fewer(method: str, ranks: int, work: Workload, idle: float) -> list[int]:
    """Return the smaller numbers of ranks that suit a method, if `idle` allows them."""
    axes = (u for u in range(1, ranks + 1) if not misfit(work.nheads, work.nheads_kv, u))
    numbers = {u * METHODS[method].most_positions(ranks // u) for u in axes}
    return sorted(x for x in numbers if (1 - idle) * ranks <= x < ranks)


def _node_blocks(
    rows: int, cols: int, heads: int, ranks_per_node: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield rank orders in which each node has a block of the grid and some of the heads."""
    for shared in _divisors(math.gcd(heads, ranks_per_node)):
        for height in _divisors(math.gcd(rows, size := ranks_per_node // shared)):
            if cols % (size // height) == 0:
                yield "rcu", (height, size // height)


def why_not(candidate: Candidate, best: Candidate) -> str:
    """Say in a few words why a candidate is not the best one."""
    if not candidate.fits:
        return "does not fit in memory"
    if not candidate.phases:
        return "not simulated: its bound is not below the best time"
    if candidate.seconds <= best.seconds:
        return "" if candidate is best else "as fast"
    ours, theirs = candidate.split, best.split
    part = max(PARTS, key=lambda x: ours[x] - theirs[x])
    lost = ours[part] - theirs[part]
    text = f"+{_percent(candidate.seconds / best.seconds - 1)}: {part} +{duration(lost)}"
    for name, one, other in (
        ("between nodes", candidate.crossing, best.crossing),
        ("received", candidate.received, best.received),
    ):
        if part == "wait" and one > 1.05 * other:
            return text + (f", {one / other:.1f}x {name}" if other else f", bytes {name}")
    if part == "compute":
        tile = (
            "other tiles" if candidate.layout.heads == best.layout.heads else "fewer heads a rank"
        )
        return f"{text}, {tile}"
    return text


def duration(seconds: float) -> str:
    """Return seconds as text in s, ms or us, with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def _percent(x: float) -> str:
    return f"{100 * x:.0f} %" if x < 9.995 else f"{x + 1:.0f}x"


def candidate(
    machine: Machine, method: str, layout: Layout, work: Workload, room: int | None = None
) -> Candidate:
    """Predict the cost of one plan by simulating it.

    Parameters
    ----------
    machine : Machine
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    layout : Layout
    work : Workload
    room : int, optional
        Bytes that a rank has for the plan.  Default: no limit.

    Raises
    ------
    ValueError
        If the heads do not fit the layout, or the machine has no kernel for the dtype.
    """
    trial = Trial(machine, method, layout, work, room)
    while trial.refine():
        pass
    return trial.candidate()


class Trial:
    """One plan during the search: its bound is refined step by step.

    Attributes
    ----------
    seconds : float
        Lower bound of the seconds; the seconds once all phases are simulated.
    bound : float
        Lower bound of the seconds before any phase was simulated.
    memory : int
        Peak bytes of the ranks looked at so far; of all ranks once all phases are simulated.
    fits : bool
        Whether `memory` suffices.

    Parameters
    ----------
    machine, method, layout, work, room
        As of `candidate`.
    """

    def __init__(
        self, machine: Machine, method: str, layout: Layout, work: Workload, room: int | None
    ) -> None:
        self._machine, self._method, self._given = machine, method, layout
        self._work, self._room = work, room
        self._chooses = layout.positions > 1 and leaves_open(method, layout, work, work.mask)
        self.memory, self.fits, self.phases, self._held = 0, True, {}, {}
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

    def streamed(self) -> list[Trial]:
        """Return the same plan with streamed tiles, or nothing if there is no such other plan."""
        if self._layout.stream or self._layout.positions == 1 or not METHODS[self._method].streams:
            return []
        return [self._other(stream=True)]

    def redistributed(self) -> list[Trial]:
        """Return the same plan with all other distributions, if none was asked for; only once."""
        if not self._chooses:
            return []
        self._chooses = False
        return [self._other(distribution=x) for x in CHOICES if x != self._layout.distribution]

    def _other(self, **change: object) -> Trial:
        layout = replace(self._layout, **change)
        return Trial(self._machine, self._method, layout, self._work, self._room)

    def refine(self) -> bool:
        """Raise the bound, or simulate a phase; False if all phases are simulated already."""
        more = next(self._stages, False)
        self.seconds = sum(self._seconds.values())
        if not self.phases:
            self.bound = self.seconds
        return more

    def _refinements(self) -> Iterator[bool]:
        for phase, steps in zip(self._work.phases, (FIRST_STEPS, None)):
            self._bound(phase, steps)
            yield True
        for phase in reversed(self._work.phases):
            self._simulate(phase)
            yield True

    def _bound(self, phase: str, steps: int | None) -> None:
        """Raise the bound of a phase by all steps, or the first ones, of rank 0 alone."""
        machine, _, layout, _ = self._plan
        survey = survey_of(*self._plan, self._problem, phase, (0,), steps)
        self._seconds[phase] = max(self._seconds[phase], _alone(machine, layout, survey, 0))
        self._held[phase] = survey.held
        self._hold((0,))

    def _simulate(self, phase: str) -> None:
        machine, _, layout, _ = self._plan
        survey = survey_of(*self._plan, self._problem, phase)
        self.phases[phase] = simulated(machine, layout, survey)
        self._seconds[phase] = float(self.phases[phase].total.max())
        messages, node = survey.messages, layout.world_ranks() // machine.ranks_per_node
        far = node[messages.source] != node[messages.to]
        self._sums += [
            np.bincount(messages.to, messages.nbytes, layout.size),
            np.bincount(node[messages.to], messages.nbytes * far, layout.size),
            np.bincount(messages.to, survey.pieces, layout.size),
        ]
        self._held[phase] = survey.held
        if self._is_simulated:
            self._hold(range(layout.size))
            self._held = {}

    @property
    def _is_simulated(self) -> bool:
        return len(self.phases) == len(self._work.phases)

    def candidate(self) -> Candidate:
        """Return the results so far."""
        method, work = self._method, self._work
        if not self._is_simulated:
            layout = vars(self).get("_layout", self._given)
            name = METHODS[method].distribution or layout.distribution
            name = name or work.mask.default_distribution
            return Candidate(method, layout, name, self.seconds, self.memory, self.fits)
        layout, name = self._layout, self._problem.shards.name
        received, crossing, messages = self._sums.max(axis=1).astype(np.int64).tolist()
        over = _over_bound(int(self._sums[0].sum()), layout, work, self._problem)
        phases = {x: self.phases[x] for x in self._work.phases}
        figures = self.memory, self.fits, phases, received, crossing, messages, over
        return Candidate(method, layout, name, self.bound, *figures)

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
    node = layout.world_ranks() // machine.ranks_per_node
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


def _divisors(n: int) -> list[int]:
    return [x for x in range(1, n + 1) if n % x == 0]
