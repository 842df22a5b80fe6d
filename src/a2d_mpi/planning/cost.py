"""Bytes, messages and work: sums over the steps and arrays of programs.

The counts are exact for shards of any size.  There is also a lower bound of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.layout import Layout
from a2d_mpi.masks.mask import Causal
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Attend, KernelCall, Message, Rows, Send
from a2d_mpi.schedules.writing import write
from a2d_mpi.sharding.pairs import pairs_of_runs

Bytes = dict[tuple[str, str], list[int]]


def nbytes(program: Program, rows: Rows) -> int:
    """Return the bytes of rows, over all tensors."""
    return rows.count * sum(program.group.row_bytes(program.arrays[rows.array]))


def pairs_of(program: Program, calls: Sequence[KernelCall]) -> np.ndarray:
    """Return the visible pairs of kernel calls, and queries that need a mask, (2, calls) int64.

    See `a2d_mpi.sharding.pairs.pairs_of_runs`.
    """
    runs = [(program.token_runs(x.queries), program.token_runs(x.keys)) for x in calls]
    return pairs_of_runs(program.mask, runs)


class Transfer(NamedTuple):
    """Rows that a rank sends to a peer or receives from it.

    Attributes
    ----------
    phase, channel : str
    sent : bool
        True: sent; False: received.
    nbytes : int
    rank, peer : int
        Ranks of the layout.
    """

    phase: str
    channel: str
    sent: bool
    nbytes: int
    rank: int
    peer: int


def moves(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int | None,
    phases: Sequence[str] = PHASES,
) -> Iterator[Transfer]:
    """Yield all rows that a rank sends or receives, array by array.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    layout : Layout
    problem : Problem
        All ranks of the layout, and all heads.
    rank : int or None
        A rank of the layout; None: all ranks.
    phases : sequence of str
    """
    ranks = range(layout.size) if rank is None else (rank,)
    for phase, own in product(phases, ranks):
        for program in write(method, phase, layout, problem, own):
            for step in program.steps:
                if isinstance(step, Message):
                    size, peer = nbytes(program, step.rows), program.ranks[step.peer]
                    yield Transfer(phase, step.channel, isinstance(step, Send), size, own, peer)


def traffic(method: str, layout: Layout, problem: Problem, rank: int) -> Bytes:
    """Return the bytes [sent, received] by a rank, by (phase, channel); see `moves`."""
    by_channel: Bytes = {}
    for move in moves(method, layout, problem, rank):
        sums = by_channel.setdefault((move.phase, move.channel), [0, 0])
        sums[not move.sent] += move.nbytes
    return by_channel


def pairs(method: str, layout: Layout, problem: Problem, rank: int) -> int:
    """Return the visible pairs that a rank computes for each head of its group; see `moves`."""
    found = 0
    for program in write(method, "forward", layout, problem, rank):
        if program.slice == 0:
            calls = [x for x in program.steps if isinstance(x, Attend)]
            found += int(pairs_of(program, calls)[0].sum())
    return found


def lower_bound(problem: Problem, area: float, tokens: float, backward: bool = False) -> float:
    """Return the bytes that a rank must at least send or receive to compute `area` pairs.

    The bound is for all heads.  Let D be `headdim` and Dv `headdim_v`.  A query that the rank does
    not own costs ``H (D + Dv)`` elements: q comes and the partial out returns.  A key costs
    ``Hkv (D + Dv)``: k and v come.  In the backward pass a query costs ``H (2 D + Dv)`` (q, dout,
    dq) and a key ``2 Hkv (D + Dv)`` (k, v, dk, dv).  lse and delta are not counted.

    Let the rank use nq queries and nk keys, and let t of its own tokens be among both.  A causal
    mask hides ``t (t-1) / 2`` of the ``nq nk`` pairs: a query among the t tokens with a later key.
    Hence ``nq nk >= area + t (t-1) / 2``.  The rank owns at most ``tokens + t`` of the queries and
    keys together, and at most ``tokens`` of each.  Let a query cost a bytes and a key b bytes.
    All of them cost ``a nq + b nk >= 2 sqrt(a b nq nk)``, and the own ones save at most
    ``max(a, b) tokens + min(a, b) t``.  So the bytes are at least
    ``2 sqrt(a b (area + t (t-1) / 2)) - max(a, b) tokens - min(a, b) t`` for the t that makes this
    least.  Under other masks no pair is assumed to be hidden.

    Parameters
    ----------
    problem : Problem
    area : float
        Visible pairs that the rank computes.
    tokens : float
        Tokens that the rank owns.
    backward : bool

    Returns
    -------
    float
        Bytes.
    """
    queries = ("q", "dout", "dq") if backward else ("q", "out")
    keys = ("k", "v", "dk", "dv") if backward else ("k", "v")
    costs = (sum(map(problem.config.nbytes, x)) for x in (queries, keys))
    less, more = sorted(costs)
    shared = tokens
    if causal := type(problem.mask) is Causal and problem.keys == problem.queries:
        ratio = more / less
        least = 0.5 + math.sqrt(max(0.0, 0.25 + (4 * area - ratio) / (4 * ratio - 2)))
        shared = min(least, tokens)
    hidden = shared * max(0.0, shared - 1) / 2 if causal else 0.0
    return max(0.0, 2 * math.sqrt(less * more * (area + hidden)) - more * tokens - less * shared)
