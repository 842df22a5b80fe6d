"""Peak memory of a rank: its arrays, the buffers of its programs, and a number for its kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from a2d_mpi.core.config import OF_KEYS, PHASES
from a2d_mpi.core.layout import Layout
from a2d_mpi.planning.cost import nbytes
from a2d_mpi.schedules.pipeline import turns
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Buffers, Program, held_bytes
from a2d_mpi.schedules.slices import ALIVE, ATTEND
from a2d_mpi.schedules.steps import KINDS
from a2d_mpi.schedules.writing import drafts_of

# Bytes of the kernels of the host.  Libraries (NumPy, OpenBLAS, MPI, Numba) allocate 4.5 MB in the
# first calls of "numpy", 111 with "numba" and 140 with "onednn".  The rest are buffers, which were
# 3 to 79 MB, 28 in the median, for thousands of tokens.
KERNELS = {"numpy": 32_000_000, "numba": 140_000_000, "onednn": 150_000_000}


def peak_memory(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    backward: bool = False,
    kernel: str | None = None,
) -> int:
    """Return the peak bytes of a rank in one call of each phase.

    The caller's arrays, the results and the plan's buffers count.

    Parameters
    ----------
    method, layout, problem, rank
        As in `a2d_mpi.planning.cost.moves`.
    backward : bool
    kernel : {"numpy", "numba", "onednn"}, optional
        Kernel of the host: `KERNELS` counts, too, and the result is about the growth of the
        process, which tests/tools/memory.py measures.  Default: none.
    """
    return peak_of(phases_of(method, layout, problem, rank, backward), problem, rank, kernel)


def most_memory(
    method: str,
    layout: Layout,
    problem: Problem,
    backward: bool = False,
) -> int:
    """Return the largest `peak_memory` of all ranks, without a kernel."""
    return max(peak_memory(method, layout, problem, p, backward) for p in range(layout.size))


class Needs(NamedTuple):
    """Bytes that one program needs.

    Attributes
    ----------
    buffers : Buffers
        Buffers of the plan, see `a2d_mpi.schedules.program.Program.buffers`.
    results : int
        Arrays of results.
    copies : int
        Copies of results that lie in buffers or have the accumulation dtype.
    """

    buffers: Buffers
    results: int
    copies: int


NOTHING = Needs(Counter(), 0, 0)


def needs_of(program: Program) -> Needs:
    """Return the memory that a program needs."""
    results = [name for name, array in program.arrays.items() if array.role == "result"]
    copies, config = 0, program.group.problem.config
    for rows in program.results.values():
        array = program.arrays[rows.array]
        for name in KINDS[array.kind]:
            rounded = name in array.accumulated and config.mixed_precision
            if name != "lse" and (rows in program.copied or rounded):
                copies += rows.count * config.nbytes(name)
    of_results = sum(nbytes(program, program.rows(name)) for name in results)
    return Needs(program.buffers, of_results, copies)


def needs_of_slices(needs: Sequence[Needs], slices: int, layout: Layout) -> list[Needs]:
    """Return the memory of the programs of all slices, given the programs of one slice."""
    if slices == 1:
        return list(needs)
    found = []
    for number, x in enumerate(needs):
        buffers = Counter({
            (f"{number}.{turn} {name}", i, of_keys): size
            for (name, i, of_keys), size in x.buffers.items()
            for turn in range(min(turns(number, layout), slices))
        })  # fmt: skip
        alive = min(ALIVE, slices) if number == ATTEND else 1
        found.append(x._replace(buffers=buffers, results=alive * x.results))
    return found


def peak_of(
    phases: Sequence[Sequence[Needs]], problem: Problem, rank: int, kernel: str | None = None
) -> int:
    """Return `peak_memory` from the memory of the programs of one phase or of both."""
    config, last = problem.config, phases[-1]
    total = held_bytes(x.buffers for needs in phases for x in needs)
    total += KERNELS[kernel] if kernel else 0
    own = problem.queries.counts[rank], problem.keys.counts[rank]
    given = ("q", "k", "v") + ("dout", "out", "lse", "delta") * (len(phases) > 1)
    # A tensor that is rounded for the wire is held twice.
    total += sum(own[x in OF_KEYS] * config.nbytes(x) * (1 + config.rounds(x)) for x in given)
    return total + sum(x.results for x in last) + last[-1].copies


def phases_of(
    method: str, layout: Layout, problem: Problem, rank: int, backward: bool
) -> list[list[Needs]]:
    """Return the memory of each program, by phase; the arguments are as of `peak_memory`."""
    phases = []
    for phase in PHASES[: 1 + backward]:
        drafts, slices = drafts_of(method, phase, layout, problem, rank)
        phases.append(needs_of_slices([needs_of(x.write()) for x in drafts], slices, layout))
    return phases
