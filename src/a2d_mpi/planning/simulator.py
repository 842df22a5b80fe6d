"""A simulator of the programs of all ranks, on links that concurrent messages share fairly.

The program of a rank is a list of operations (`Operations`) of three kinds:

* the rank is busy for some seconds, with one of `PARTS`;
* `POST`: the rank spends the overheads of messages and then posts them, to send or to receive;
* `WAIT`: the rank waits until messages have arrived.  Receiving them takes seconds of its core,
  which may overlap with waiting.

The number of a message is its index in the columns of `Messages`.  A message starts when both
sides have posted it, and the message before it between the same two ranks has passed its links.
It arrives one latency after its last byte has passed.  All messages on a link share its bandwidth
max-min fairly (progressive filling: Bertsekas and Gallager, Data Networks, section 6.5.2).  Ranks
affect each other by messages only, so a rank runs ahead until it must wait.

The rates of messages are computed again when messages start or end.  Starts and ends that are
close to each other (`COARSE`) are one event: each message keeps its own time, but the rates change
only once.  For many messages (`MANY`) Numba compiles the loops, if it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from a2d_mpi.planning.flows import POST, WAIT, Flows, State, compiled, run
from a2d_mpi.planning.network import Cables

# The operations of a rank in order: part, begin, end, and messages that it posts or waits for.
Spans = list[tuple[str, float, float, list[int]]]
PARTS = ("compute", "merge", "wait", "other")
# Kinds of operations: the first four are `PARTS`, then come `POST` and `WAIT`.
COMPUTE, MERGE, _, OTHER = range(4)
# Starts and ends of messages within this share of the time (a lower bound of it) are one event.
COARSE = 1e-3
# With this many messages Numba is worth its import of 0.5 s.  A causal grid of 256 ranks, 11,520
# messages, takes 0.23 s without it and 0.06 s with it; 64 ranks, 1344 messages, 0.04 and 0.006 s.
MANY = 10_000


class Operations(NamedTuple):
    """Operations of all ranks, one rank after the other.

    Attributes
    ----------
    first : (P + 1,) int64
        Index of each rank's first operation.
    kind : (n,) int64
        An index in `PARTS`, `POST` or `WAIT`.
    seconds : (n,) float64
    begin : (n + 1,) int64
        Index in `numbers` of each operation's first message.
    numbers : ndarray of int64
        Messages of the operations, one operation after the other.
    """

    first: np.ndarray
    kind: np.ndarray
    seconds: np.ndarray
    begin: np.ndarray
    numbers: np.ndarray

    @property
    def rank(self) -> np.ndarray:
        """Rank of every operation, (n,) int64."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @property
    def operation(self) -> np.ndarray:
        """Operation of each entry of `numbers`, int64."""
        return np.repeat(np.arange(len(self.kind)), np.diff(self.begin))

    def of_rank(self, rank: int) -> Iterator[tuple[int, float, list[int]]]:
        """Yield the kind, the seconds and the messages of each operation of a rank."""
        own = slice(self.first[rank], self.first[rank + 1])
        begin = self.begin[self.first[rank] : self.first[rank + 1] + 1].tolist()
        numbers = self.numbers[begin[0] : begin[-1]].tolist()
        ends = (x - begin[0] for x in begin)
        columns = self.kind[own].tolist(), self.seconds[own].tolist(), pairwise(ends)
        return ((kind, seconds, numbers[a:b]) for kind, seconds, (a, b) in zip(*columns))


class Messages(NamedTuple):
    """Messages of all ranks, as columns of their properties, (n,) int64.

    Attributes
    ----------
    source, to : ndarray
        Rank that sends, and rank that receives.
    nbytes : ndarray
        Bytes.
    tensors : ndarray
        Tensors of every message; each costs the overhead of a message.
    """

    source: np.ndarray
    to: np.ndarray
    nbytes: np.ndarray
    tensors: np.ndarray


def simulate(
    operations: Operations,
    messages: Messages,
    cables: Cables,
    place: np.ndarray,
    spans: list[Spans] | None = None,
) -> dict[str, np.ndarray]:
    """Run the programs of all ranks together.

    Parameters
    ----------
    operations : Operations
    messages : Messages
    cables : Cables
        The links that messages pass.
    place : (P,) int64
        World rank of every rank.
    spans : list of Spans, optional
        One list for each rank; the spans of the rank's operations are appended to it.

    Returns
    -------
    dict of str to (P,) float64
        Seconds of each rank, by `PARTS`.

    Raises
    ------
    ValueError
        If ranks wait for ever.
    """
    parts, size = spent(operations), len(operations.first) - 1
    missing, flows = _flows(operations, messages, cables, place)
    state = State(missing, 0.0 * missing, operations.first[:-1].copy(), *np.zeros((3, size)))
    load = sum(np.bincount(x, flows.nbytes, len(flows.bandwidth)) for x in flows.passed)
    least = max((load / flows.bandwidth).max(), sum(parts.values()).max())
    given, loop = (operations, state), run
    if len(messages.source) >= MANY:
        loop = compiled()
    if loop == run:  # Python reads and writes elements of lists faster than elements of arrays
        given = tuple(type(x)(*(y.tolist() for y in x)) for x in given)
        names = ("waiter", "ends", "latency", "posted", "pair", "last", "after", "sent")
        flows = flows._replace(**{x: getattr(flows, x).tolist() for x in names})
    loop(*given, flows, COARSE * least)
    state = State(*map(np.asarray, given[1]))
    if stuck := np.flatnonzero(state.at < operations.first[1:]).tolist():
        at = state.at[stuck[0]]
        numbers = operations.numbers[operations.begin[at] : operations.begin[at + 1]][:4]
        pairs = ", ".join(f"{messages.source[m]} to {messages.to[m]}" for m in numbers)
        raise ValueError(
            f"{len(stuck)} of {size} ranks wait forever: rank {stuck[0]} waits for one of the "
            f"messages {pairs}"
        )
    for rank, mine in enumerate(spans or ()):
        ends = state.end[operations.first[rank] : operations.first[rank + 1]].tolist()
        for (kind, _, numbers), begin, end in zip(operations.of_rank(rank), [0.0, *ends], ends):
            part = PARTS[kind] if kind < POST else "wait" if kind == WAIT else "other"
            mine.append((part, begin, end, numbers))
    return {**parts, "wait": state.waited}


def spent(operations: Operations) -> dict[str, np.ndarray]:
    """Return the seconds that each rank is busy with each part, (P,) float64."""
    size = len(operations.first) - 1
    part = np.where(operations.kind == POST, OTHER, operations.kind)
    busy = np.where(part < POST, operations.seconds, 0.0)
    place = np.minimum(part, OTHER) * size + operations.rank
    sums = np.bincount(place, busy, size * len(PARTS)).reshape(-1, size)
    return dict(zip(PARTS, sums))


def _flows(
    operations: Operations, messages: Messages, cables: Cables, place: np.ndarray
) -> tuple[np.ndarray, Flows]:
    """Count the messages of each wait, and make the columns of messages."""
    ends, n = np.stack([messages.source, messages.to]), len(messages.source)
    awaited = operations.kind[operations.operation] == WAIT
    number, operation = operations.numbers[awaited], operations.operation[awaited]
    waiter = np.full((2, n), -1)
    waiter[(ends[1, number] == operations.rank[operation]).astype(int), number] = operation
    missing = np.bincount(waiter[waiter >= 0], minlength=len(operations.kind))
    there = place[messages.source], place[messages.to]
    routes = cables.routes(*there).T
    links = len(cables.bandwidth)  # one more link, without a limit, stands for -1
    pairs, pair = np.unique(messages.source * len(place) + messages.to, return_inverse=True)
    return missing, Flows(
        messages.nbytes.astype(float), np.where(routes < 0, links, routes),
        cables.latency(*there), np.append(cables.bandwidth, np.inf),
        waiter, ends, np.zeros(n, np.int64), np.zeros(n),
        pair, np.full(len(pairs), -1), np.full(n, -1), np.zeros(n, bool),
    )  # fmt: skip
