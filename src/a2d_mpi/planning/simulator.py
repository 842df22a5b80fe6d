"""Seconds that programs of all ranks take on links that concurrent messages share fairly.

The program of a rank is a list of operations:

* ``("spend", part, seconds)``: the rank is busy with one of `PARTS`;
* ``("post", numbers)``: it posts messages, which it sends or receives;
* ``("wait", numbers, seconds)``: it waits until messages have arrived.  Receiving them takes
  that many seconds of its core, in which it may have worked while it waited.

A message is known by its number, its place in the columns of `Messages`.  It starts when both
sides have posted it and the message before it, from the same rank to the same rank, has passed
its links; it arrives a latency after its own last byte has.  All messages on a link share its
bandwidth max-min fairly (progressive filling: Bertsekas and Gallager, Data Networks, section
6.5.2).  Ranks affect each other by messages only, so a rank runs ahead until it must wait.

The shares are computed again when messages start or end.  Starts and ends that are close to each
other (`COARSE`) are one event: each message keeps its own time, the shares change once.  For many
messages (`MANY`) Numba compiles the loops, if it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from a2d_mpi.planning.flows import Actions, Flows, Ranks, compiled, run
from a2d_mpi.planning.network import Cables

Operation = tuple
Spans = list[tuple[str, float, float]]  # part, begin and end of all that a rank does, in order
PARTS = ("compute", "merge", "wait", "other")
# Starts and ends of messages are one event within this share of a lower bound of the time.
COARSE = 1e-3
# Messages from which on Numba is worth its import, 0.5 s.  A causal grid of 256 ranks, 11,520
# messages, takes 0.23 s without it and 0.06 s with it; 64 ranks, 1344 messages, 0.04 and 0.006 s.
MANY = 10_000


class Messages(NamedTuple):
    """Messages of all ranks, one column for each of their properties, all (n,) int64.

    Attributes
    ----------
    source, to : ndarray
        Ranks.
    nbytes : ndarray
        At least 1.
    """

    source: np.ndarray
    to: np.ndarray
    nbytes: np.ndarray


def simulate(
    programs: Sequence[Sequence[Operation]],
    messages: Messages,
    cables: Cables,
    place: np.ndarray,
    spans: list[Spans] | None = None,
    coarse: float = COARSE,
    in_order: bool = True,
) -> dict[str, np.ndarray]:
    """Run the programs of all ranks together.

    Parameters
    ----------
    programs : sequence of sequences of operations
        By rank.
    messages : Messages
    cables : Cables
        The links that messages pass.
    place : (P,) int64
        Physical rank of every rank.
    spans : list of Spans, optional
        Gets, by rank, all that it does.
    coarse : float
        See `COARSE`.
    in_order : bool
        Whether messages from one rank to another pass one after the other, as over a connection,
        or share their links like all others.

    Returns
    -------
    dict of str to (P,) float64
        Seconds that each rank spends with each of `PARTS`.

    Raises
    ------
    ValueError
        If ranks wait for ever.
    """
    parts = spent(programs)
    actions, ends = _actions(programs), np.stack([messages.source, messages.to])
    flows = _flows(actions, messages, cables, place, in_order)
    ranks = Ranks(actions.first[:-1].copy(), *np.zeros((3, len(programs))))
    load = sum(np.bincount(x, flows.nbytes, len(flows.bandwidth)) for x in flows.passed)
    least = max((load / flows.bandwidth).max(), sum(parts.values()).max())
    loop = run if len(messages.source) < MANY else compiled()
    loop(actions, ranks, flows, coarse * least)
    if stuck := np.flatnonzero(ranks.at < actions.first[1:]).tolist():
        at = ranks.at[stuck[0]]
        numbers = actions.numbers[actions.begin[at] : actions.begin[at + 1]][:4]
        pairs = ", ".join(f"{x} to {y}" for x, y in ends[:, numbers].T.tolist())
        raise ValueError(
            f"{len(stuck)} of {len(programs)} ranks wait for ever, rank {stuck[0]} for one of "
            f"the messages {pairs}"
        )
    for rank in range(len(spans or ())):
        _record(spans[rank], programs[rank], actions.end[actions.first[rank] :])
    return {**parts, "wait": ranks.waited}


def spent(programs: Sequence[Sequence[Operation]]) -> dict[str, np.ndarray]:
    """Seconds that each rank is busy with each part."""
    found = {part: [0.0] * len(programs) for part in PARTS}
    for rank, program in enumerate(programs):
        for operation in program:
            if operation[0] == "spend":
                found[operation[1]][rank] += operation[2]
    return {part: np.array(seconds) for part, seconds in found.items()}


def _actions(programs: Sequence[Sequence[Operation]]) -> Actions:
    """Columns of the posts and waits; what ranks are busy with delays them."""
    first, waits, delays, work, begin, numbers = [0], [], [], [], [0], []
    for program in programs:
        delay = 0.0
        for operation in program:
            if operation[0] == "spend":
                delay += operation[2]
                continue
            waits.append(operation[0] == "wait")
            delays.append(delay)
            work.append(operation[2] if waits[-1] else 0.0)
            numbers += operation[1]
            begin.append(len(numbers))
            delay = 0.0
        first.append(len(waits))
    count = len(waits)
    return Actions(
        np.array(first), np.array(waits, bool), np.array(delays, float), np.array(work, float),
        np.array(begin), np.array(numbers, np.int64),
        np.zeros(count, bool), np.zeros(count, np.int64), np.zeros(count),
    )  # fmt: skip


def _flows(
    actions: Actions, messages: Messages, cables: Cables, place: np.ndarray, in_order: bool
) -> Flows:
    """Columns of the messages; tells the waits how many they wait for."""
    ends, n = np.stack([messages.source, messages.to]), len(messages.source)
    rank = np.repeat(np.arange(len(actions.first) - 1), np.diff(actions.first))
    sizes = np.diff(actions.begin)
    action = np.repeat(np.arange(len(sizes)), sizes * actions.waits)
    number = actions.numbers[np.repeat(actions.waits, sizes)]
    waiter = np.full((2, n), -1)
    waiter[(ends[1, number] == rank[action]).astype(int), number] = action
    actions.missing[:] = np.bincount(waiter[waiter >= 0], minlength=len(sizes))
    there = place[messages.source], place[messages.to]
    routes = cables.routes(*there).T
    links = len(cables.bandwidth)
    pairs, pair = np.unique(messages.source * len(place) + messages.to, return_inverse=True)
    if not in_order:
        pairs = pair = np.arange(n)
    return Flows(
        messages.nbytes.astype(float), np.where(routes < 0, links, routes),  # one that is no limit
        cables.latency(*there), np.append(cables.bandwidth, np.inf),
        waiter, ends, np.zeros(n, np.int64), np.zeros(n),
        pair, np.full(len(pairs), -1), np.full(n, -1), np.zeros(n, bool),
    )  # fmt: skip


def _record(spans: Spans, program: Sequence[Operation], ends: np.ndarray) -> None:
    """Add what a rank does to its spans, by when its actions ended."""
    now, end = 0.0, iter(ends.tolist())
    for operation in program:
        begin, part = now, operation[1]
        if operation[0] == "spend":
            now += operation[2]
        elif operation[0] == "wait":
            now, part = max(now, next(end)), "wait"  # sums of another order: not earlier by a bit
        else:
            next(end)
            continue
        if spans and spans[-1][0] == part:
            spans[-1] = part, spans[-1][1], now
        elif now > begin or not spans:
            spans.append((part, begin, now))
