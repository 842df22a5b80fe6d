"""Bytes and messages of every method, read off its schedule, and what nobody can do without.

Exact for shards of any sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from a2d_mpi.core.config import PHASES
from a2d_mpi.core.meetings import Ranks
from a2d_mpi.core.problem import Problem
from a2d_mpi.core.sizes import Layout
from a2d_mpi.schedules import write, write_all
from a2d_mpi.schedules.accounts import messages as messages_of
from a2d_mpi.schedules.accounts import number_of_messages

Bytes = dict[tuple[str, str], list[int]]


class Move(NamedTuple):
    """Messages between a rank, or every rank, and a peer of it.

    Attributes
    ----------
    phase, channel : str
    sent : bool
        Or received.
    tokens : Ranks
    tensors : sequence of int
        Bytes of a token in each message.
    rank, peer : Ranks
        Logical ranks.
    """

    phase: str
    channel: str
    sent: bool
    tokens: Ranks
    tensors: Sequence[int]
    rank: Ranks
    peer: Ranks


def traffic(method: str, layout: Layout, problem: Problem, rank: int) -> Bytes:
    """Bytes [sent, received] by a logical rank, by (phase, communicator).

    Parameters
    ----------
    method : str
        One of `METHODS`.
    layout : Layout
    problem : Problem
        With the counts of all ranks of the layout and all heads.
    rank : int
        Logical.
    """
    return _summed(method, layout, problem, rank, lambda nbytes: nbytes)


def messages(method: str, layout: Layout, problem: Problem, rank: int) -> Bytes:
    """The number of messages; otherwise like `traffic`."""
    return _summed(method, layout, problem, rank, number_of_messages)


def moves(
    method: str,
    layout: Layout,
    problem: Problem,
    rank: int | None,
    phases: Sequence[str] = PHASES,
    sent: bool | None = None,
) -> Iterator[Move]:
    """All messages of a logical rank, or of all ranks (None): then they may be arrays.

    `sent`: only those that are sent, or only those that are received.
    """
    group = problem.config.context_group(layout.heads)
    for phase in phases:
        if rank is None:
            chains = write_all(method, phase, layout, problem)
        else:
            chains = [write(method, phase, layout, problem, rank)]
        for schedule in chain.from_iterable(chains):
            for message, tokens, tensors in messages_of(schedule, group, sent):
                ends = (schedule.logical(x) for x in (schedule.rank, message.peer))
                yield Move(phase, message.channel, message.sent, tokens, tensors, *ends)


def lower_bound(problem: Problem, area: float, tokens: float, backward: bool = False) -> float:
    """Bytes that a rank must receive or return, if it computes `area` pairs for all heads.

    A rank that meets nq queries with nk keys reads q and returns out, ``2 nq H D`` elements, and
    reads k and v, ``2 nk Hkv D``; with ``nq nk >= area`` this is at least
    ``4 D sqrt(H Hkv area)``, less what it owns (q, k, v, out of its `tokens`).  Backward it
    touches q, dout, dq and k, v, dk, dv: ``4 sqrt(3) D sqrt(H Hkv area)``.  Elements count
    `itemsize` bytes; lse and delta are not counted.
    """
    q, kv = problem.config.nbytes("q"), 2 * problem.config.nbytes("k")
    per_q, per_k = (3 * q, 2 * kv) if backward else (2 * q, kv)
    return max(0.0, 2 * math.sqrt(per_q * per_k * area) - tokens * (per_q + per_k))


def _summed(method, layout, problem, rank, size) -> Bytes:
    found: Bytes = {}
    for move in moves(method, layout, problem, rank):
        both = found.setdefault((move.phase, move.channel), [0, 0])
        both[not move.sent] += sum(size(move.tokens * x) for x in move.tensors)
    return {key: both for key, both in found.items() if any(both)}
