"""Search for the fastest method, grid and rank order on a machine; no MPI import.

Every candidate gets a lower bound of its time: what two of its ranks take if their peers never
keep them waiting and their links carry nothing else.  Candidates are simulated in the order of
their bounds until no bound is below the best simulated time.

::

    machine = read_machine("data/machines/h100-64x1.toml")
    work = Workload(1 << 20, nheads=96, headdim=128, mask=Causal(), backward=True)
    best = best_candidate(machine, 64, work)
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product

import numpy as np

from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.pairs import visible_pairs
from a2d_mpi.core.problem import Problem, Workload
from a2d_mpi.core.sizes import Layout, misfit
from a2d_mpi.planning import cost
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.model import Phase, simulated, slowest_seconds
from a2d_mpi.planning.simulator import PARTS, Operation
from a2d_mpi.planning.survey import Survey, survey_of
from a2d_mpi.schedules import METHODS, distribution_of, essence, problem_of


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
    progress: Callable[[Sequence], Iterable] = iter,
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
        Shows how far it is: it is given a sequence and iterates over it, as ``tqdm`` does.
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
    # Those after each other that have the same programs.
    alike = sorted(shapes, key=lambda x: (x[0], x[1].size, x[1].heads, x[1].rows, x[1].block))
    bounded = {x: _bounded(machine, *x, work, room) for x in alike}
    groups: dict[tuple, list[tuple[str, Layout]]] = {}
    for x in sorted((x for x in alike if bounded[x].fits), key=lambda x: bounded[x].bound):
        groups.setdefault((x[0], essence(*x)), []).append(x)
    best: list[float] = []
    for group in progress(list(groups.values())):
        for x in group:
            if number is not None and len(best) >= number and bounded[x].bound >= best[number - 1]:
                continue
            bounded[x] = _simulated(machine, bounded[x], work, room)
            if bounded[x].fits:
                insort(best, bounded[x].seconds)
    return sorted(bounded.values(), key=lambda x: (not x.fits, x.seconds, x.bound))


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
        raise ValueError(f"no plan fits: the smallest needs {least} bytes a rank")
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
    """Numbers of ranks, somewhat fewer, with which a method has larger context groups."""
    axes = (u for u in range(1, ranks + 1) if not misfit(work.nheads, work.nheads_kv, u))
    numbers = {u * METHODS[method].whole(ranks // u) for u in axes}
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
    return _simulated(machine, _bounded(machine, method, layout, work, room), work, room)


def _simulated(machine: Machine, plan: Candidate, work: Workload, room: int | None) -> Candidate:
    """The same plan, simulated."""
    method, layout = plan.method, plan.layout
    problem = problem_of(method, layout, work, work.mask)
    found = survey_of(machine, method, layout, work, problem)
    node = layout.physical() // machine.ranks_per_node
    received, crossing = np.zeros(layout.size), np.zeros(int(node.max()) + 1)
    for messages in found.messages.values():
        received += np.bincount(messages.to, messages.nbytes, layout.size)
        far = node[messages.source] != node[messages.to]
        crossing += np.bincount(node[messages.to], messages.nbytes * far, len(crossing))
    return replace(
        plan,
        phases=simulated(machine, layout, found),
        memory=found.memory,
        fits=room is None or found.memory <= room,
        received=int(received.max()),
        crossing=int(crossing.max()),
        messages=found.received,
        over_bound=_over_bound(int(received.sum()), layout, work, problem),
    )


def _bounded(
    machine: Machine, method: str, layout: Layout, work: Workload, room: int | None
) -> Candidate:
    """A plan that is not simulated, with the bound of its time that two of its ranks give.

    The two ranks have the first and the last row and the first column of the grid: with zigzag and
    contiguous shards no rank has more to send or to receive under a causal mask.
    """
    problem = problem_of(method, layout, work, work.mask)
    ranks = tuple(sorted({0, (layout.positions - layout.cols) * layout.heads}))
    found = survey_of(machine, method, layout, work, problem, ranks)
    seconds = 0.0
    for phase, operations in found.operations.items():
        costs = _costs_alone(machine, layout, found, phase)
        receiver = found.messages[phase].to.tolist()
        alone = (
            _alone(mine, [x == r for x in receiver], *costs) for r, mine in zip(ranks, operations)
        )
        seconds += max(alone)
    fits = room is None or found.memory <= room
    name = distribution_of(method, work.mask)
    return Candidate(method, layout, name, float(seconds), found.memory, fits)


def _costs_alone(
    machine: Machine, layout: Layout, found: Survey, phase: str
) -> tuple[list[bool], list[float], list[float], list[float]]:
    """Of every message: whether it is between nodes, overhead, s on its own links, latency."""
    messages, node = found.messages[phase], layout.physical() // machine.ranks_per_node
    far = node[messages.source] != node[messages.to]
    inside, between = machine.links(layout.size)
    port = between.bandwidth * max(1.0, between.nics / machine.ranks_per_node)
    overhead = found.tensors[phase] * np.where(far, between.overhead, inside.overhead)
    seconds = messages.nbytes / np.where(far, port, inside.bandwidth)
    latency = np.where(far, between.latency, inside.latency)
    return far.tolist(), overhead.tolist(), seconds.tolist(), latency.tolist()


def _alone(
    operations: Sequence[Operation],
    receives: Sequence[bool],
    far: Sequence[bool],
    overhead: Sequence[float],
    seconds: Sequence[float],
    latency: Sequence[float],
) -> float:
    """Seconds of a rank whose peers never keep it waiting, and whose links carry nothing else.

    When a rank has waited for all messages that it has posted, later ones start at that time at
    the earliest: what they take is added.
    """
    now = since = 0.0
    posted: dict[int, float] = {}
    carried: dict[tuple[bool, bool], float] = {}
    for operation in operations:
        if operation[0] == "spend":
            now += operation[2]
        elif operation[0] == "post":
            now += sum(overhead[m] for m in operation[1])
            posted.update(dict.fromkeys(operation[1], now))
        else:
            for m in operation[1]:
                if m in posted:
                    link = receives[m], far[m]
                    carried[link] = carried.get(link, since) + seconds[m]
                    arrival = max(carried[link], posted.pop(m) + seconds[m]) + latency[m]
                    now = max(now, arrival)
            if not posted:
                since, carried = now, {}
    return now


def _over_bound(received: int, layout: Layout, work: Workload, problem: Problem) -> float:
    """Of balanced attention, whose ranks all have the same area and tokens."""
    whole = (Distribution("contiguous", n, 1) for n in (work.seqlen, work.seqlen_kv))
    area = int(visible_pairs(problem.mask, *whole)[0].sum()) / layout.size
    least = sum(
        cost.lower_bound(problem, area, work.seqlen / layout.size, phase == "backward")
        for phase in work.phases
    )
    return received / (layout.size * least) if least else float("inf")


def _divisors(n: int) -> list[int]:
    return [x for x in range(1, n + 1) if n % x == 0]
