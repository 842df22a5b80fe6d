"""Search for the fastest method, grid and rank order on a machine; no MPI import.

Every candidate has a lower bound of its time, which grows as more of the candidate is known: what
a rank computes on average; what the first steps of one rank take if its peers never keep it
waiting and its links carry nothing else; the same of all its steps; and one phase after the other,
simulated.  The candidate with the least bound is always the next one to be known better, until one
that is simulated has the least.

A candidate can lead to others.  A grid that does not fit in memory is tried streamed.  Where the
mask leaves the distribution open, a candidate has the one that `a2d_mpi.sharding.choice` takes for
the machine; when it turns out to be the fastest, its other distributions are tried.

::

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

# Steps of a rank that give a first bound: a ring of 4096 ranks takes seconds to write.
FIRST_STEPS = 600


@dataclass(frozen=True)
class Candidate:
    """One way to compute, and what it costs.

    Attributes
    ----------
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    layout : Layout
        With `stream`, if only so there might be memory enough.
    distribution : str
    bound : float
        Seconds that it takes at least.
    memory : int
        Bytes that a rank holds at most; if it was not simulated: that some ranks hold.
    fits : bool
        Whether the memory suffices.
    phases : dict of str to Phase
        Seconds of every rank; empty if it was not simulated.
    received, crossing : int
        Bytes that the busiest rank receives, and that the busiest node gets from other nodes; 0 if
        it was not simulated.
    messages : int
        MPI messages that the busiest rank receives, likewise.
    over_bound : float
        Bytes that all ranks receive, as a multiple of the bytes that exact attention without a
        head axis cannot do without (`a2d_mpi.planning.cost.lower_bound`); below 1 is possible
        with a head axis, inf on one rank, NaN if it was not simulated.
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
        """Seconds of the slowest rank, phase by phase; inf if it was not simulated."""
        return slowest_seconds(self.phases) if self.phases else math.inf

    @property
    def split(self) -> dict[str, float]:
        """Seconds of each part on the slowest ranks; they add up to `seconds`."""
        slowest = [(phase, int(phase.total.argmax())) for phase in self.phases.values()]
        return {x: sum(float(getattr(phase, x)[i]) for phase, i in slowest) for x in PARTS}

    @property
    def known_as(self) -> str:
        """Name under which others know it; empty if there is none."""
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
    """All candidates for that many ranks.

    First those that were simulated and fit, fastest first; then those that were not simulated, by
    their bounds; then those that do not fit.

    Parameters
    ----------
    machine : Machine
    ranks : int
        P; nodes are filled one after the other.
    work : Workload
    memory : int, optional
        Bytes of a rank; default: what the machine says, and no limit if it says nothing.
    methods : sequence of str, optional
        Default: all of `a2d_mpi.schedules.METHODS`.
    progress : callable
        Shows how far it is: it is given an iterator and iterates over it, as ``tqdm`` does.
    idle : float
        Share of the ranks that may be left idle, for methods that cannot have any number.
    number : int, optional
        Candidates that are certain to be the fastest: others are simulated until they are.  None:
        all are simulated.

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
    # Those that have the same programs follow each other.
    shapes.sort(key=lambda x: (x[0], x[1].size, x[1].heads, x[1].rows, x[1].block))
    trials: list[Trial] = []
    for _ in progress(_search(trials, shapes, machine, work, room, number)):
        pass
    found = [x.candidate() for x in trials]
    return sorted(found, key=lambda x: (not x.fits, x.seconds, x.bound))


def _search(
    trials: list[Trial],
    shapes: Sequence[tuple[str, Layout]],
    machine: Machine,
    work: Workload,
    room: int | None,
    number: int | None,
) -> Iterator[None]:
    """Know the candidate with the least bound better, again and again; yields after each step."""
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
    """Numbers of new trials."""
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
    """The fastest candidates that fit, fastest first: so many or fewer; None: that of each method.

    Other arguments as for `candidates`.

    Raises
    ------
    ValueError
        If none fits, with the least memory that one needs.
    """
    found = []
    for some in [methods] if number is not None else [(x,) for x in methods or METHODS]:
        found += candidates(machine, ranks, work, memory, some, number=number or 1)
    found.sort(key=lambda x: (not x.fits, x.seconds))
    if not found:
        raise ValueError(f"no plan for {ranks} ranks with {', '.join(methods or METHODS)}")
    if not found[0].fits:
        least = min(candidate.memory for candidate in found) + machine.reserved
        raise ValueError(f"no plan fits: the smallest needs at least {least} bytes a rank")
    fit = [x for x in found if x.fits and x.phases]
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
    """The fastest candidate that fits; see `best_candidates`."""
    return best_candidates(machine, ranks, work, 1, memory, methods)[0]


def layouts(method: str, ranks: int, work: Workload, ranks_per_node: int) -> Iterator[Layout]:
    """All layouts that suit a method and differ in shape or in who shares a node."""
    known = METHODS[method]
    if known.place:
        if work.mask.default_distribution != "balanced" or work.seqlen_kv != work.seqlen:
            return  # others are as good, and a placement takes seconds
    elif known.distribution and work.mask.default_distribution == "contiguous":
        return  # for masks that see everything it is another method
    if not known.takes(work.mask):
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
                if known.knows_nodes
                else product(map("".join, permutations("rcu")), [(1, 1)])
            ):
                layout = Layout(rows, cols, heads, order, block)
                # Who shares a node with whom, whatever the node is called.
                there = layout.on_nodes(node)
                if known.knows_nodes:
                    layout = there
                key = (rows, cols, heads, there.nodes)
                if key not in seen and known.suits(layout):
                    seen.add(key)
                    yield layout


def _fewer(method: str, ranks: int, work: Workload, idle: float) -> list[int]:
    """Numbers of ranks, somewhat fewer, with which a method has larger context-parallel groups."""
    axes = (u for u in range(1, ranks + 1) if not misfit(work.nheads, work.nheads_kv, u))
    numbers = {u * METHODS[method].most_positions(ranks // u) for u in axes}
    return sorted(x for x in numbers if (1 - idle) * ranks <= x < ranks)


def _node_blocks(
    rows: int, cols: int, heads: int, ranks_per_node: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Orders and blocks for nodes that each have a block of the grid, and some of its heads."""
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
    """In s, ms or us, with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def _percent(x: float) -> str:
    return f"{100 * x:.0f} %" if x < 9.995 else f"{x + 1:.0f}x"


def candidate(
    machine: Machine, method: str, layout: Layout, work: Workload, room: int | None = None
) -> Candidate:
    """Simulate one plan; `room`: bytes that a rank has for it, default: any number."""
    trial = Trial(machine, method, layout, work, room)
    while trial.refine():
        pass
    return trial.candidate()


class Trial:
    """One plan, of which more and more is known.

    Attributes
    ----------
    seconds : float
        That it takes at least; what it takes, if all is known.
    bound : float
        The same, before a phase was simulated.
    memory : int
        Bytes that a rank holds at least; at most, if all is known.
    fits : bool

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
        self._stages = self._known_better()

    # Layout and problem are made when they are needed: a balanced distribution is a search.
    @cached_property
    def _layout(self) -> Layout:
        """With the distribution that is the fastest in closed form."""
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
        """The same plan with streamed tiles, if there is one and this is another."""
        if self._layout.stream or self._layout.positions == 1 or not METHODS[self._method].streams:
            return []
        return [self._other(stream=True)]

    def redistributed(self) -> list[Trial]:
        """The same plan with other distributions, if none was asked for; once."""
        if not self._chooses:
            return []
        self._chooses = False
        return [self._other(distribution=x) for x in CHOICES if x != self._layout.distribution]

    def _other(self, **change: object) -> Trial:
        layout = replace(self._layout, **change)
        return Trial(self._machine, self._method, layout, self._work, self._room)

    def refine(self) -> bool:
        """Bound it better, or simulate a phase; False if all is known."""
        more = next(self._stages, False)
        self.seconds = sum(self._seconds.values())
        if not self.phases:
            self.bound = self.seconds
        return more

    def _known_better(self) -> Iterator[bool]:
        for phase, steps in zip(self._work.phases, (FIRST_STEPS, None)):
            self._bound(phase, steps)
            yield True
        for phase in reversed(self._work.phases):
            self._simulate(phase)
            yield True

    def _bound(self, phase: str, steps: int | None) -> None:
        """Bound it by rank 0, or its first steps, if its peers never keep it waiting."""
        machine, _, layout, _ = self._plan
        found = survey_of(*self._plan, self._problem, phase, (0,), steps)
        self._seconds[phase] = max(self._seconds[phase], _alone(machine, layout, found, 0))
        self._held[phase] = found.held
        self._hold((0,))

    def _simulate(self, phase: str) -> None:
        machine, _, layout, _ = self._plan
        found = survey_of(*self._plan, self._problem, phase)
        self.phases[phase] = simulated(machine, layout, found)
        self._seconds[phase] = float(self.phases[phase].total.max())
        messages, node = found.messages, layout.world_ranks() // machine.ranks_per_node
        far = node[messages.source] != node[messages.to]
        nbytes = messages.nbytes * (found.pieces > 0)  # a barrier moves none
        self._sums += [
            np.bincount(messages.to, nbytes, layout.size),
            np.bincount(node[messages.to], nbytes * far, layout.size),
            np.bincount(messages.to, found.pieces, layout.size),
        ]
        self._held[phase] = found.held
        if self._is_known:
            self._hold(range(layout.size))
            self._held = {}

    @property
    def _is_known(self) -> bool:
        return len(self.phases) == len(self._work.phases)

    def candidate(self) -> Candidate:
        """All that is known."""
        method, work = self._method, self._work
        if not self._is_known:
            layout = vars(self).get("_layout", self._given)
            known = METHODS[method].distribution or layout.distribution
            name = known or work.mask.default_distribution
            return Candidate(method, layout, name, self.seconds, self.memory, self.fits)
        layout, name = self._layout, self._problem.shards.name
        received, crossing, messages = self._sums.max(axis=1).astype(np.int64).tolist()
        over = _over_bound(int(self._sums[0].sum()), layout, work, self._problem)
        phases = {x: self.phases[x] for x in self._work.phases}
        figures = self.memory, self.fits, phases, received, crossing, messages, over
        return Candidate(method, layout, name, self.bound, *figures)

    def _hold(self, ranks: Sequence[int]) -> None:
        """Find the memory of these ranks, of the phases that are known."""
        kernel = self._plan[0].host_kernel(self._work.dtype)
        phases = zip(*(self._held[x] for x in self._work.phases if x in self._held))
        self.memory = max(peak_of(x, self._problem, p, kernel) for p, x in zip(ranks, phases))
        self.fits = self._room is None or self.memory <= self._room


def _floor(machine: Machine, ranks: int, work: Workload, phase: str) -> float:
    """Seconds that a rank computes at least in a phase, however the pairs are divided."""
    kernel = machine.kernel(work.dtype, phase)
    area = _area(work.mask.aligned(work.seqlen, work.seqlen_kv), work.seqlen, work.seqlen_kv)
    backward = phase == PHASES[1]
    operations = flops(area, work.nheads, work.headdim, backward, work.headdim_v)
    return operations / ranks / kernel.flops / machine.share


@lru_cache(maxsize=16)
def _area(mask: Mask, seqlen: int, seqlen_kv: int) -> int:
    """Visible pairs."""
    return int(pairs_of_runs(mask, [([range(seqlen)], [range(seqlen_kv)])])[0, 0])


def _alone(machine: Machine, layout: Layout, found: Survey, rank: int) -> float:
    """Seconds of a rank, if nothing but its own messages keeps it waiting.

    Its peers are always there, and its links carry nothing else.  When the rank has waited for all
    messages that it has posted, later ones start at that time at the earliest: what they take is
    added.
    """
    operations, messages = found.operations, found.messages
    node = layout.world_ranks() // machine.ranks_per_node
    far = node[messages.source] != node[messages.to]
    inside, between = machine.links(layout.size)
    port = between.bandwidth * max(1.0, between.nics / machine.ranks_per_node)
    passing = (messages.nbytes / np.where(far, port, inside.bandwidth)).tolist()
    latency = np.where(far, between.latency, inside.latency).tolist()
    link = (2 * far + (messages.to == rank)).tolist()
    now = since = idle = 0.0
    posted: dict[int, float] = {}
    carried: dict[int, float] = {}  # until when a link carries what the rank has waited for
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
        paid = min(idle, seconds)  # it works for these messages while it waits
        idle -= paid
        now = ready + seconds - paid
        if not posted:
            since, carried = now, {}
    return now


def _over_bound(received: int, layout: Layout, work: Workload, problem: Problem) -> float:
    """Of balanced attention, whose ranks all have the same area and tokens."""
    area = _area(problem.mask, work.seqlen, work.seqlen_kv) / layout.size
    least = sum(
        cost.lower_bound(problem, area, work.seqlen / layout.size, phase == "backward")
        for phase in work.phases
    )
    return received / (layout.size * least) if least else float("inf")


def _divisors(n: int) -> list[int]:
    return [x for x in range(1, n + 1) if n % x == 0]
