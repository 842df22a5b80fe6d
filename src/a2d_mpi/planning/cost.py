"""Bytes and messages of every method, read off its schedule, and what nobody can do without.

Exact for shards of any sizes.  With a head axis of U ranks (`a2d_mpi.core.sizes.Layout`) a
schedule is that of each layer, for the tokens of whole cells and 1/U of the heads, and the
exchange of heads comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.sizes import Layout, Problem
from a2d_mpi.schedules import METHODS as KNOWN
from a2d_mpi.schedules import write
from a2d_mpi.schedules.accounts import messages as messages_of
from a2d_mpi.schedules.accounts import number_of_messages
from a2d_mpi.schedules.steps import Ranks

METHODS = tuple(KNOWN)
PHASES = ("forward", "backward")
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
    peer : Ranks
        Logical rank.
    """

    phase: str
    channel: str
    sent: bool
    tokens: Ranks
    tensors: Sequence[int]
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
    rank: Ranks,
    phases: Sequence[str] = PHASES,
    sent: bool | None = None,
) -> Iterator[Move]:
    """All messages of a logical rank, or of an array of ranks: then bytes and peers are arrays.

    `sent`: only those that are sent, or only those that are received.
    """
    if len(problem.counts) != layout.size:
        raise ValueError(f"{len(problem.counts)} parts for {layout.size} ranks")
    if method not in KNOWN:
        raise ValueError(f"unknown method {method!r}; one of {METHODS}")
    group, me, u = problem.context_group(layout.heads), rank // layout.heads, rank % layout.heads
    for phase in phases:
        heads = _heads(problem, layout.heads, rank, phase)
        yield from (move for move in heads if sent in (None, move.sent))
        if layout.positions > 1:
            schedule = write(method, phase, layout, group, me)
            for message, tokens, tensors in messages_of(schedule, group, sent):
                peer = message.peer * layout.heads + u
                yield Move(phase, message.channel, message.sent, tokens, tensors, peer)


def lower_bound(problem: Problem, area: float, tokens: float, backward: bool = False) -> float:
    """Bytes that a rank must receive or return, if it computes `area` pairs for all heads.

    A rank that meets nq queries with nk keys reads q and returns out, ``2 nq H D`` elements, and
    reads k and v, ``2 nk Hkv D``; with ``nq nk >= area`` this is at least
    ``4 D sqrt(H Hkv area)``, less what it owns (q, k, v, out of its `tokens`).  Backward it
    touches q, dout, dq and k, v, dk, dv: ``4 sqrt(3) D sqrt(H Hkv area)``.  Elements count
    `itemsize` bytes; lse and delta are not counted.
    """
    p = problem
    per_q, per_k = (3 * p.q, 2 * p.kv) if backward else (2 * p.q, p.kv)
    return max(0.0, 2 * math.sqrt(per_q * per_k * area) - tokens * (per_q + per_k))


def _heads(p: Problem, heads: int, rank: Ranks, phase: str) -> Iterator[Move]:
    if heads == 1:
        return
    layer, n = p.context_group(heads), np.array(p.counts) if np.ndim(rank) else p.counts
    q, k, lse = layer.q, layer.kv // 2, layer.lse
    # Several layers share a key head: its gradients are summed by the owner, in the compute dtype.
    dk = layer.dkv // 2 if p.nheads_kv < heads else k
    there, back = q + 2 * k, q + lse
    if phase == "backward":
        there, back = 2 * q + 2 * lse + 2 * k, q + 2 * dk
    for peer in (rank - rank % heads + (rank + i) % heads for i in range(1, heads)):
        mine, theirs = n[rank], n[peer]
        # All tensors in one message.
        yield Move(phase, "head", True, mine, [there], peer)
        yield Move(phase, "head", False, theirs, [there], peer)
        yield Move(phase, "head", True, theirs, [back], peer)
        yield Move(phase, "head", False, mine, [back], peer)


def _summed(method, layout, problem, rank, size) -> Bytes:
    found: Bytes = {}
    for move in moves(method, layout, problem, rank):
        both = found.setdefault((move.phase, move.channel), [0, 0])
        both[not move.sent] += sum(size(move.tokens * x) for x in move.tensors)
    return {key: both for key, both in found.items() if any(both)}
