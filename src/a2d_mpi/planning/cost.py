"""Bytes and messages of every method, read off its programs, and what nobody can do without.

Exact for shards of any sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import MAX_MESSAGE, Layout
from a2d_mpi.masks.mask import Causal
from a2d_mpi.schedules import write
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.steps import Receive, Send

Bytes = dict[tuple[str, str], list[int]]
_MESSAGES = {None: (Send, Receive), True: Send, False: Receive}


class Move(NamedTuple):
    """Rows between a rank and a peer of it.

    Attributes
    ----------
    phase, channel, kind : str
    sent : bool
        Or received.
    tokens : int
    tensors : list of int
        Bytes of a token in each tensor.
    rank, peer : int
        Of the layout.
    """

    phase: str
    channel: str
    kind: str
    sent: bool
    tokens: int
    tensors: list[int]
    rank: int
    peer: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.tokens * sum(self.tensors)

    @property
    def messages(self) -> int:
        """MPI messages in which they travel."""
        return sum(-(-self.tokens * x // MAX_MESSAGE) for x in self.tensors)


def moves(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int | None,
    phases: Sequence[str] = PHASES,
    sent: bool | None = None,
) -> Iterator[Move]:
    """All rows that a rank sends or receives, array by array.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    layout : Layout
    problem : Problem
        With all ranks of the layout and all heads.
    rank : int or None
        Of the layout; None: all ranks.
    phases : sequence of str
    sent : bool, optional
        Only rows that are sent, or only rows that are received.
    """
    ranks = range(layout.size) if rank is None else (rank,)
    for phase, x in product(phases, ranks):
        for program in write(method, phase, layout, problem, x):
            for step in program.steps:
                if isinstance(step, _MESSAGES[sent]):
                    array, peer = program.arrays[step.rows.array], program.grid_rank(step.peer)
                    rows = step.rows.count, program.group.row_bytes(array)
                    ends = isinstance(step, Send), *rows, x, peer
                    yield Move(phase, step.channel, array.kind, *ends)


def traffic(method: str, layout: Layout, problem: Problem, rank: int) -> Bytes:
    """Bytes [sent, received] by a rank, by (phase, channel); arguments as of `moves`."""
    return _summed(moves(method, layout, problem, rank), "nbytes")


def messages(method: str, layout: Layout, problem: Problem, rank: int) -> Bytes:
    """The number of MPI messages; otherwise like `traffic`."""
    return _summed(moves(method, layout, problem, rank), "messages")


def _summed(found: Iterable[Move], figure: str) -> Bytes:
    both: Bytes = {}
    for move in found:
        sums = both.setdefault((move.phase, move.channel), [0, 0])
        sums[not move.sent] += getattr(move, figure)
    return both


def lower_bound(problem: Problem, area: float, tokens: float, backward: bool = False) -> float:
    """Bytes that a rank must receive or return, if it computes `area` pairs for all heads.

    Queries that a rank does not own cost ``H (D + Dv)`` elements each, Dv the width of values: it
    reads q, and its partial out returns.  Keys cost ``Hkv (D + Dv)``, k and v.  Backward these are
    ``H (2 D + Dv)`` (q, dout, dq) and ``2 Hkv (D + Dv)`` (k, v, dk, dv).  Elements count in bytes;
    lse and delta are not counted.

    Let the rank use nq queries and nk keys, and let t of its own tokens be among both.  Of the
    ``nq nk`` pairs a causal mask hides ``t (t-1) / 2``, those of a query among the t tokens and a
    later key, so ``nq nk >= area + t (t-1) / 2``.  At most ``tokens`` of the queries and as many
    of the keys are its own, ``tokens + t`` together.  With costs a and b of a query and a key,
    the bytes are at least ``2 sqrt(a b (area + t (t-1) / 2)) - max(a, b) tokens - min(a, b) t``
    for the t where this is least: docs/planning.md has the proof.  Under other masks nothing is
    assumed hidden.

    Parameters
    ----------
    problem : Problem
    area : float
        Visible pairs.
    tokens : float
        That the rank owns.
    backward : bool
    """
    queries = ("q", "dout", "dq") if backward else ("q", "out")
    keys = ("k", "v", "dk", "dv") if backward else ("k", "v")
    costs = (sum(map(problem.config.nbytes, x)) for x in (queries, keys))
    less, more = sorted(costs)
    shared = tokens
    if causal := type(problem.mask) is Causal and problem.keys is None:
        ratio = more / less
        least = 0.5 + math.sqrt(max(0.0, 0.25 + (4 * area - ratio) / (4 * ratio - 2)))
        shared = min(least, tokens)
    hidden = shared * max(0.0, shared - 1) / 2 if causal else 0.0
    return max(0.0, 2 * math.sqrt(less * more * (area + hidden)) - more * tokens - less * shared)
