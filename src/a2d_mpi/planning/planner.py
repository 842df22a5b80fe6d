"""Search for the fastest method, grid and rank order on a machine; no MPI import.

Every candidate has a lower bound of its time.  The bound grows in three stages:

1. the computing of an average rank;
2. one rank alone, one phase after the other, as if the rank had its links for itself and its
   peers were never late;
3. a simulation of all ranks, one phase after the other.

The search always refines the candidate with the smallest bound.  It ends when a candidate that is
fully simulated has the smallest one.

The bounds are for one slice of the heads.  After the search, the candidates with the smallest
times or bounds are simulated with more slices.

A candidate can lead to others.  If the mask leaves the distribution open, a candidate first has
the distribution that `a2d_mpi.sharding.choice` takes for the machine.  If this candidate turns out
to be the fastest, it is tried with the other distributions, too.

Example::

    machine = read_machine("data/machines/h100-64x1.toml")
    work = Workload(1 << 20, nheads=96, headdim=128, mask=Causal(), backward=True)
    best = best_candidate(machine, 64, work)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from a2d_mpi.planning.candidate import Candidate
from a2d_mpi.planning.layouts import fewer_ranks, layouts
from a2d_mpi.planning.machine import Machine
from a2d_mpi.planning.simulator import PARTS
from a2d_mpi.planning.workload import Layers, Workload
from a2d_mpi.schedules.method import METHODS

SLICED, SMALL = 8, 256  # candidates that try slices of the heads, on so many ranks at most


def candidates(
    machine: Machine,
    ranks: int,
    work: Workload | Layers,
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
        Without `memory` there is no limit of memory.
    ranks : int
        P; nodes are filled one after the other.
    work : Workload or sequence of (int, Workload)
        A sequence stands for all layers of a model, of one or several kinds: the number of layers
        of each kind, and their workload.  Their heads are the same.
    methods : sequence of str, optional
        Default: all of `a2d_mpi.schedules.method.METHODS`.
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
    layers = [(1, work)] if isinstance(work, Workload) else work
    _, first = layers[0]
    # Layers of several kinds need one distribution.
    given = (None,) if len(layers) == 1 else ("contiguous", "zigzag")
    shapes = [
        (method, replace(layout, distribution=name))
        for method in (METHODS if methods is None else methods)
        if all(METHODS[method].takes(x.mask) for _, x in layers)
        for size in (ranks, *fewer_ranks(method, ranks, first, idle))
        for layout in layouts(method, size, first, machine.ranks_per_node)
        for name in ((None,) if METHODS[method].distribution else given[: layout.positions])
    ]
    # Layouts with the same programs follow each other, because few surveys are cached.
    shapes.sort(key=lambda x: (x[0], x[1].size, x[1].heads, x[1].rows, x[1].block))
    found: list[Candidate] = []
    made = (Candidate(machine, method, layout, layers) for method, layout in shapes)
    for _ in progress(_search(found, made, number)):
        pass
    fastest = sorted((x for x in found if x.fits), key=lambda x: x.bound)
    for x in progress(iter(fastest[: SLICED if ranks <= SMALL else 2])):
        if x.bound < 1.3 * fastest[0].bound:
            while x.refine():
                pass
            x.slice_heads()
    return sorted(found, key=lambda x: (not x.fits, x.seconds, x.bound))


def _search(
    found: list[Candidate], made: Iterable[Candidate], number: int | None
) -> Iterator[None]:
    """Refine the candidate with the smallest bound, again and again; yield after each step."""
    for x in made:
        found.append(x)
        yield
    queue = [(x.bound, i) for i, x in enumerate(found)]
    heapify(queue)
    while queue and number != 0:
        i = heappop(queue)[1]
        if found[i].refine():
            new = [i] * found[i].fits
        elif others := found[i].redistributed():  # it is the fastest so far
            new = [i, *range(len(found), len(found) + len(others))]
            found += others
        elif number is not None:  # no bound of the others is below its time
            number -= 1
            continue
        else:
            continue
        for j in new:
            heappush(queue, (found[j].bound, j))
        yield


def best_candidates(
    machine: Machine,
    ranks: int,
    work: Workload,
    number: int | None,
    methods: Sequence[str] | None = None,
) -> list[Candidate]:
    """Return the fastest candidates that fit in memory, fastest first.

    Parameters
    ----------
    number : int or None
        Most candidates to return.  None: the fastest candidate of each method.
    machine, ranks, work, methods
        As of `candidates`.

    Raises
    ------
    ValueError
        If there is no candidate or none fits.  The message has the least memory that one needs.
    """
    searches = [methods] if number is not None else [(x,) for x in methods or METHODS]
    found = [candidates(machine, ranks, work, x, number=number or 1) for x in searches]
    if not any(found):
        raise ValueError(f"no plan of {', '.join(methods or METHODS)} fits {ranks} ranks")
    fastest = [
        x for of_search in found for x in of_search[: number or 1] if x.fits and x.was_simulated
    ]
    if not fastest:
        least = min(x.memory for of_search in found for x in of_search) + machine.reserved
        raise ValueError(f"no plan fits in memory: the smallest needs {least} bytes per rank")
    return sorted(fastest, key=lambda x: x.seconds)


def best_candidate(
    machine: Machine,
    ranks: int,
    work: Workload,
    methods: Sequence[str] | None = None,
) -> Candidate:
    """Return the fastest candidate that fits in memory; see `best_candidates`."""
    return best_candidates(machine, ranks, work, 1, methods)[0]


def why_not(candidate: Candidate, best: Candidate) -> str:
    """Say in a few words why a candidate is not the best one."""
    if not candidate.fits:
        return "does not fit in memory"
    if not candidate.was_simulated:
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
        same_heads = candidate.layout.heads == best.layout.heads
        text += ", other tiles" if same_heads else ", fewer heads per rank"
    return text


def duration(seconds: float) -> str:
    """Return seconds as text in s, ms or us, with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def _percent(x: float) -> str:
    return f"{100 * x:.0f} %" if x < 9.995 else f"{x + 1:.0f}x"
