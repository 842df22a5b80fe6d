"""Search for the fastest method, grid and rank order on a machine; no MPI import.

::

    machine = read_machine("data/machines/h100-64x1.toml")
    work = Workload(1 << 20, nheads=96, headdim=128, mask=Causal(), backward=True)
    best = best_candidate(machine, 64, work)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.pairs import visible_pairs
from a2d_mpi.core.problem import Problem, Workload
from a2d_mpi.core.sizes import Layout, misfit
from a2d_mpi.planning import cost
from a2d_mpi.planning.clock import PARTS
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.memory import most_memory
from a2d_mpi.planning.model import Phase, predict, slowest_seconds
from a2d_mpi.schedules import METHODS, distribution_of, essence, problem_of
from a2d_mpi.schedules.accounts import number_of_messages


@dataclass(frozen=True)
class Candidate:
    """One way to compute, and what it costs.

    Attributes
    ----------
    method : str
        One of `a2d_mpi.schedules.METHODS`.
    layout : Layout
    distribution : str
    phases : dict of str to Phase
        Seconds of every logical rank.
    received, crossing : int
        Bytes that the busiest rank receives, and that the busiest node gets from other nodes.
    messages : int
        That the busiest rank receives.
    memory : int
        Bytes that a rank holds at most.
    over_bound : float
        Bytes that all ranks receive, as a multiple of what exact attention without a head axis
        cannot do without (`a2d_mpi.planning.cost.lower_bound`); below 1 is possible with a head
        axis, inf on one rank.
    fits : bool
        Whether the memory suffices.
    """

    method: str
    layout: Layout
    distribution: str
    phases: dict[str, Phase]
    received: int
    crossing: int
    messages: int
    memory: int
    over_bound: float
    fits: bool

    @property
    def seconds(self) -> float:
        """Of the slowest rank, phase by phase."""
        return slowest_seconds(self.phases)

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
) -> list[Candidate]:
    """All candidates for that many ranks: those that fit, fastest first, then those that do not.

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
        for number in (ranks, *_fewer(method, ranks, work, idle))
        for layout in layouts(method, number, work, machine.ranks_per_node)
    ]
    # Those after each other that share the matrices of visible pairs.
    alike = sorted(shapes, key=lambda x: (distribution_of(x[0], work.mask), x[1].heads))
    found = {x: candidate(machine, *x, work, room) for x in progress(alike)}
    return sorted((found[x] for x in shapes), key=lambda x: (not x.fits, x.seconds))


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
    found = candidates(machine, ranks, work, memory, methods)
    if not found:
        raise ValueError(f"no plan for {ranks} ranks with {', '.join(methods or METHODS)}")
    if not found[0].fits:
        least = min(candidate.memory for candidate in found) + machine.reserved
        raise ValueError(f"no plan fits: the smallest needs {least} bytes a rank")
    fit = [x for x in found if x.fits]
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
    """Costs of one plan; `room`: bytes that a rank has for it, default: any number."""
    name = distribution_of(method, work.mask)
    problem = problem_of(method, layout, work, work.mask, name)
    kernel = machine.host_kernel(work.config.dtype)
    received, number, memory = _needs(
        method, essence(method, layout), problem, work.backward, kernel
    )
    node = layout.physical() // machine.ranks_per_node
    ranks, sources, nbytes = received
    whole = np.zeros(layout.size, np.int64)
    np.add.at(whole, ranks, nbytes)
    crosses = node[sources] != node[ranks]
    return Candidate(
        method,
        layout,
        name,
        predict(machine, method, layout, work, name),
        int(whole.max()),
        int(np.bincount(node[ranks], nbytes * crosses, 1).max()),
        number,
        memory,
        _over_bound(int(whole.sum()), layout, work, problem),
        room is None or memory <= room,
    )


@lru_cache(maxsize=1)
def _needs(
    method: str, layout: Layout, problem: Problem, backward: bool, kernel: str | None
) -> tuple[tuple[np.ndarray, ...], int, int]:
    """All that is received, (ranks, sources, bytes), and the most messages and memory of a rank.

    The same for layouts of the same essence.
    """
    received: dict[tuple, list] = {}
    messages = np.zeros(layout.size, np.int64)
    phases = PHASES[: 1 + backward]
    for move in cost.moves(method, layout, problem, None, phases, sent=False):
        # Sources of all ranks are neighbours at some distance along an axis: rank 0's tells it.
        first = np.ravel(move.peer)[0], None if np.ndim(move.rank) else move.rank
        found = received.setdefault(first, [move.rank, move.peer, 0])
        found[2] = found[2] + move.tokens * sum(move.tensors)
        for size in set(move.tensors):
            number = number_of_messages(move.tokens * size)
            messages[move.rank] += move.tensors.count(size) * number
    memory = most_memory(method, layout, problem, backward, kernel)
    columns = zip(*(np.broadcast_arrays(*found) for found in received.values()))
    arrays = tuple(np.concatenate([np.ravel(x) for x in column]) for column in columns)
    return arrays or (np.zeros(0, np.int64),) * 3, int(messages.max()), memory


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
