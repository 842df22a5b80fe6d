"""Widening of the bounds of a check by a narrow format on the wire: see docs/wire.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.around import ROUNDED
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.core.config import OF_KEYS, PHASES
from a2d_mpi.core.wire import FORMATS, rounded
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS, Encode, Merge, Message, Move, Send
from a2d_mpi.schedules.writing import write
from a2d_mpi.sharding.triangle_shards import segment_begins


class WireErrors:
    """Bounds of the errors by the rounding of partial results.

    Each shard is cut into pieces.  The keys of a piece contribute to out and dq, its queries to dk
    and dv.  A result is the sum of all contributions, and a partial result is a sum of some.  The
    size of an element x of a contribution is ``(u |x| + f X) / (u + f)``, where X is the largest
    element of its head, u is `Format.error` and f is `Format.floor`.

    Parameters
    ----------
    plan : AttentionPlan
        A plan with `wire`.

    Attributes
    ----------
    pieces : list of slice
        The pieces of this rank's shard.
    group : int
        Query heads of a KV head.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan, self._format = plan, FORMATS[plan.config.wire]
        cuts = np.searchsorted(plan.tokens, segment_begins(plan.problem.queries)).tolist()
        self.pieces = [slice(*x) for x in pairwise([0, *cuts, len(plan.tokens)])]
        self.group = plan.nheads // plan.nheads_kv
        self._terms: dict[str, float] = {}  # largest sums of sizes, by result

    def rounded(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return those of the caller's tensors that travel in the format, rounded to it."""
        names = (x for x in ROUNDED if x in tensors and self._plan.config.rounds(x))
        return {x: rounded(tensors[x], self._plan.config.wire) for x in names}

    def add(self, name: str, own: int, contributions: Sequence[np.ndarray]) -> None:
        """Count this rank's contributions to the rows of all ranks, `own` of them its own.

        The rows are in the order of ranks.  Collective.
        """
        u, f = self._format.error, self._format.floor
        sizes = sum(
            (u * x + f * x.max(axis=-1, keepdims=True)) / (u + f)
            for x in map(np.abs, contributions)
        )
        comm = self._plan.grid.comm
        comm.Allreduce(MPI.IN_PLACE, sizes)
        begin = sum(comm.allgather(own)[: comm.rank])
        sizes = sizes[begin : begin + own]
        group = self.group if name in OF_KEYS else 1  # dk and dv have one for each query head
        n, heads, width = sizes.shape
        sizes = sizes.reshape(n, heads // group, group, width).sum(axis=2)
        self._terms[name] = max(self._terms.get(name, 0.0), float(sizes.max(initial=0)))

    def widening(self) -> dict[str, float]:
        """Return a bound of each result's error by rounding.  Collective.

        It is ``((1 + u + f)^h - 1) terms``, where h is the number of roundings of a result on its
        way (`roundings`).  One rounding adds at most u + f times the size of the partial result to
        the error, and these sizes add up to at most `terms`.  lse has none: it is not rounded.
        """
        plan, number = self._plan, Counter()
        for phase in PHASES if "dq" in self._terms else PHASES[:1]:
            ranks, whole = range(plan.layout.size), replace(plan.layout, slices=None)
            number |= roundings([write(plan.method, phase, whole, plan.problem, x) for x in ranks])
        errors = {}
        for name, size in self._terms.items():
            h = number[name] if plan.config.rounds(name, accumulated=True) else 0
            size = plan.grid.comm.allreduce(size, op=MPI.MAX)
            errors[name] = ((1 + self._format.error + self._format.floor) ** h - 1) * size
        return errors


def roundings(programs: Sequence[Sequence[Program]]) -> dict[str, int]:
    """Return how often a result is encoded on its way to its owner, at most, by tensor.

    Parameters
    ----------
    programs : sequence of sequence of Program
        The programs of all ranks of a layout in one phase.
    """
    sent: dict[tuple, int] = {}  # encodings of the contents of each message, by tensor
    before = None
    while sent != before:
        before, found = dict(sent), Counter()
        for rank, parts in enumerate(programs):
            given: Counter[str] = Counter()
            for number, program in enumerate(parts):
                given = _depths(program, rank, number, given, sent)
            found |= given  # the larger number of each
    return found


def _depths(
    program: Program, rank: int, number: int, given: Counter[str], sent: dict[tuple, int]
) -> Counter[str]:
    """Return how often the results of a program were encoded; add its messages to `sent`."""
    kinds = {name: KINDS[x.kind] for name, x in program.arrays.items()}
    depth: Counter[tuple[str, str]] = Counter()
    for name, array in program.arrays.items():
        if array.role == "given":
            depth.update({(name, x): given[x] for x in kinds[name]})
    for step in program.steps:
        if isinstance(step, Message):
            ends, name = (rank, program.ranks[step.peer]), step.rows.array
            for x in kinds[name]:
                key = number, step.tag, step.turn, x
                if isinstance(step, Send):
                    sent[(*ends, *key)] = depth[name, x]
                else:
                    depth[name, x] = max(depth[name, x], sent.get((*ends[::-1], *key), 0))
        elif isinstance(step, Move | Merge):
            for x in kinds[step.target.array]:
                source = depth[step.source.array, x] + isinstance(step, Encode)
                depth[step.target.array, x] = max(depth[step.target.array, x], source)
    results = ((rows, x) for rows in program.results.values() for x in kinds[rows.array])
    return Counter({x: depth[rows.array, x] for rows, x in results})
