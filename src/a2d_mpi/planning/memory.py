"""Peak memory of a rank: arrays, buffers of its programs, and buffers of its kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from a2d_mpi.core.config import OF_KEYS, PHASES
from a2d_mpi.core.kernel_memory import kernel_buffers
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.intervals import queries_per_key
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.planning.cost import nbytes
from a2d_mpi.schedules.pipeline import turns
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.slices import ALIVE, ATTEND
from a2d_mpi.schedules.steps import KINDS, KernelCall, Merge
from a2d_mpi.schedules.writing import drafts_of

# Bytes that libraries (NumPy, OpenBLAS, MPI, Numba, this package) allocate in the first calls of a
# kernel of the host.  Measured with plans of 64 tokens on 1, 2 and 4 ranks, with MPICH and Open
# MPI: 3 to 5.5 MB with NumPy, 109 to 112 MB with Numba 0.68.  73 MB of the latter are files, which
# processes share.  oneDNN takes 29 MB more, the very first import of Numba, which compiles, 32.
LIBRARIES = {"numpy": 4_500_000, "numba": 111_000_000, "onednn": 140_000_000}
INTERVAL = 16  # bytes of one interval of visible keys: begin and end
STATISTICS = 56  # bytes of temporaries for each lse of a merge


def peak_memory(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int,
    backward: bool = False,
    kernel: str | None = None,
) -> int:
    """Return the peak bytes of a rank in one call of each phase.

    The caller's arrays, the results, the plan's buffers and the kernel's buffers count.

    Parameters
    ----------
    method, layout, problem, rank
        As in `a2d_mpi.planning.cost.moves`.
    backward : bool
    kernel : {"numpy", "numba", "onednn"}, optional
        Kernel of the host.  Its buffers and `LIBRARIES` count, and the result is the growth of the
        process, which tests/tools/memory.py measures.  Default: a kernel without buffers, as on
        GPUs.
    """
    return peak_of(_phases(method, layout, problem, rank, backward, kernel), problem, rank, kernel)


def most_memory(
    method: str,
    layout: Layout,
    problem: Problem,
    backward: bool = False,
) -> int:
    """Return the largest `peak_memory` of all ranks, with a kernel without buffers."""
    return max(peak_memory(method, layout, problem, p, backward) for p in range(layout.size))


def buffers(
    method: str, layout: Layout, problem: Problem, rank: int, backward: bool = False
) -> int:
    """Return the bytes that a plan keeps between calls: `AttentionPlan.buffer_bytes`.

    With `backward`, after a backward call.  Other parameters as of `peak_memory`.
    """
    return _buffers(_phases(method, layout, problem, rank, backward))


class Needs(NamedTuple):
    """Bytes that one program needs.

    Attributes
    ----------
    buffers : dict of (str, int, bool) to int
        Buffers of the plan, see `a2d_mpi.schedules.program.Program.buffers`.
    results : int
        Arrays of results.
    copies : int
        Copies of results that lie in buffers or have the accumulation dtype.
    intervals : int
        Intervals of visible keys, which the kernel reads.
    kernel : dict of str to int
        Buffers of the kernel.
    passing : int
        Largest sum of the kernel's buffers and temporary arrays.
    """

    buffers: dict[tuple[str, int, bool], int]
    results: int
    copies: int
    intervals: int
    kernel: dict[str, int]
    passing: int


NOTHING = Needs({}, 0, 0, 0, {}, 0)


def needs_of(program: Program, backward: bool, kernel: str | None = None) -> Needs:
    """Return the memory that a program needs; `kernel` as of `peak_memory`."""
    results = [name for name, array in program.arrays.items() if array.role == "result"]
    copies, config = 0, program.group.problem.config
    for rows in program.results.values():
        array = program.arrays[rows.array]
        for name in KINDS[array.kind]:
            rounded = name in array.accumulated and config.mixed_precision
            if name != "lse" and (rows in program.copied or rounded):
                copies += rows.count * config.nbytes(name)
    of_results = sum(nbytes(program, program.rows(name)) for name in results)
    of_kernel = (0, {}, 0) if kernel is None else _of_kernel(program, backward, kernel)
    return Needs(program.buffers, of_results, copies, *of_kernel)


def needs_of_slices(needs: Sequence[Sequence[Needs]], layout: Layout) -> list[Needs]:
    """Return the memory of the programs of all slices.

    Parameters
    ----------
    needs : sequence of sequence of Needs
        By slice and program.
    layout : Layout
    """
    slices = len(needs)
    if slices == 1:
        return list(needs[0])
    found = []
    for number, x in enumerate(needs[0]):
        buffers = {
            (f"{number}.{turn} {name}", i, of_keys): size
            for (name, i, of_keys), size in x.buffers.items()
            for turn in range(min(turns(number, layout), slices))
        }
        alive = min(ALIVE, slices) if number == ATTEND else 1
        found.append(x._replace(buffers=buffers, results=alive * x.results))
    return found


def peak_of(
    phases: Sequence[Sequence[Needs]], problem: Problem, rank: int, kernel: str | None = None
) -> int:
    """Return `peak_memory` from the memory of the programs of one phase or of both."""
    total, config, last = _buffers(phases), problem.config, phases[-1]
    if kernel is not None:
        both = list(chain.from_iterable(phases))
        needed = _largest(x.kernel for x in both)
        total += LIBRARIES[kernel] + sum(x.intervals for x in both)
        # The backward pass needs more than the temporary arrays of the forward pass.
        total += needed if len(phases) > 1 else max(x.passing for x in both)
    own = problem.queries.counts[rank], problem.keys.counts[rank]
    given = ("q", "k", "v") + ("dout", "out", "lse", "delta") * (len(phases) > 1)
    # A tensor that is rounded for the wire is held twice.
    total += sum(own[x in OF_KEYS] * config.nbytes(x) * (1 + config.rounds(x)) for x in given)
    return total + sum(x.results for x in last) + last[-1].copies


def _phases(
    method: str, layout: Layout, problem: Problem, rank: int, backward: bool, kernel=None
) -> list[list[Needs]]:
    phases = []
    for i, phase in enumerate(PHASES[: 1 + backward]):
        drafts = drafts_of(method, phase, layout, problem, rank)
        needs = {x: needs_of(x.write(), i > 0, kernel) for x in set(chain.from_iterable(drafts))}
        of_drafts = [[needs[x] for x in of_slice] for of_slice in drafts]
        phases.append(needs_of_slices(of_drafts, layout))
    return phases


def _buffers(phases: Sequence[Sequence[Needs]]) -> int:
    return _largest(x.buffers for x in chain.from_iterable(phases))


def _largest(several: Iterable[dict[Any, int]]) -> int:
    """Return the bytes of all buffers; a buffer is as large as its largest size in any dict."""
    largest: dict[Any, int] = {}
    for sizes in several:
        for name, size in sizes.items():
            if size > largest.get(name, 0):
                largest[name] = size
    return sum(largest.values())


def _of_kernel(program: Program, backward: bool, kernel: str) -> tuple[int, dict[str, int], int]:
    """Return the last three attributes of `Needs` for a kernel of the host."""
    needed: dict[str, int] = {}
    intervals = peak = 0
    config = program.group.config
    for step in program.steps:
        passing = 0  # temporary arrays of this step
        if isinstance(step, KernelCall):
            nq, nk = step.queries.count, step.keys.count
            pieces, hides = _visible(program, step)
            intervals += INTERVAL * pieces * nq
            if not pieces:
                continue
            given = config, nq, nk, backward, hides, kernel
            for name, size in kernel_buffers(*given).items():
                needed[name] = max(int(size), needed.get(name, 0))
        elif isinstance(step, Merge):
            # Statistics, and out in the accumulation dtype.
            of_row = STATISTICS * config.nheads
            if config.mixed_precision:
                of_row += config.nbytes("out", accumulated=True)
            passing = of_row * step.source.count
        peak = max(peak, sum(needed.values()) + passing)
    return intervals, needed, peak


def _visible(program: Program, step: KernelCall) -> tuple[int, bool]:
    """Return the intervals per query, 0 if no pair is visible, and whether a key is masked."""
    if not program.sees(step.queries, step.keys):
        return 0, False
    if type(program.mask) is Full:
        return 1, False
    if type(program.mask) is Causal:
        return 1, program.extremes(step.queries)[1] < program.extremes(step.keys)[1]
    queries, keys = program.tokens(step.queries), np.sort(program.tokens(step.keys))
    intervals = program.mask.intervals(queries, keys)
    return len(intervals), not queries_per_key(intervals, len(keys)).all()
