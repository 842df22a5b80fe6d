"""Inner loops of the simulator: advance ranks, end messages, and share links among messages.

Numba can compile all functions of this module but `compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

# Links are filled in one round if the rates that they give differ by no more than this share.
ALIKE = 1e-3
POST, WAIT = 4, 5  # kinds of operations, see `a2d_mpi.planning.simulator`


class State(NamedTuple):
    """State of every operation of `a2d_mpi.planning.simulator.Operations`, and of every rank."""

    missing: np.ndarray  # (n,): messages of a wait that have not arrived
    end: np.ndarray  # (n,) s: latest arrival so far; in the end, when the operation ended
    at: np.ndarray  # (P,): next operation of the rank
    now: np.ndarray  # (P,) s: time of the rank
    idle: np.ndarray  # (P,) s of waiting in which the core was free
    waited: np.ndarray  # (P,) s spent in waits


class Flows(NamedTuple):
    """Messages and links, and the state of every message."""

    nbytes: np.ndarray  # (n,) float64
    passed: np.ndarray  # (links of a message, n): links that each message passes
    latency: np.ndarray  # (n,) s
    bandwidth: np.ndarray  # (links,) bytes/s
    waiter: np.ndarray  # (2, n): where its source, its receiver waits for it; -1: nowhere
    ends: np.ndarray  # (2, n): ranks of its source and its receiver
    posted: np.ndarray  # (n,): number of sides that have posted it
    start: np.ndarray  # (n,) s: both sides have posted it, and the message before it has passed
    pair: np.ndarray  # (n,): number of the pair (source, receiver)
    last: np.ndarray  # (pairs,): latest message of a pair that both sides have posted; -1: none
    after: np.ndarray  # (n,): message of the same pair that waits for this one; -1: none
    sent: np.ndarray  # (n,) bool: all bytes have passed


def _advance(rank, operations, state, flows, pending, count):
    """Advance a rank until it must wait; messages that may start are appended to `pending`."""
    now = state.now[rank]
    busy = 0.0  # s since `now`: short times are summed before they are added to a long one
    i = state.at[rank]
    while i < operations.first[rank + 1]:
        seconds = operations.seconds[i]
        if operations.kind[i] == WAIT:
            now += busy
            busy = 0.0
            if state.missing[i]:
                break
            ready = max(now, state.end[i])
            idle = state.idle[rank] + ready - now
            paid = min(idle, seconds)  # work that the core did while the rank waited
            state.idle[rank] = idle - paid
            ready += seconds - paid
            state.waited[rank] += ready - now
            now = ready
        else:
            busy += seconds
            if operations.kind[i] == POST:
                now += busy
                busy = 0.0
            for k in range(operations.begin[i], operations.begin[i + 1]):
                m = operations.numbers[k]
                flows.posted[m] += 1
                flows.start[m] = max(flows.start[m], now)
                if flows.posted[m] == 2:
                    before = flows.last[flows.pair[m]]
                    flows.last[flows.pair[m]] = m
                    if before >= 0 and not flows.sent[before]:
                        flows.after[before] = m
                    else:
                        pending[count] = m
                        count += 1
        state.end[i] = now + busy
        i += 1
    state.now[rank] = now + busy
    state.at[rank] = i
    return count


def _arrive(m, done, state, flows, woken, number):
    """Mark a message as arrived; ranks whose waits are over are appended to `woken`."""
    for side in range(2):
        i = flows.waiter[side][m]
        if i >= 0:
            state.missing[i] -= 1
            state.end[i] = max(state.end[i], done)
            rank = flows.ends[side][m]
            if state.missing[i] == 0 and state.at[rank] == i:
                woken[number] = rank
                number += 1
    return number


def _shares(passed, bandwidth):
    """Return the max-min fair rates, bytes/s, of flows that pass links, (links of a flow, flows).

    Each round fills all links whose flows get no lower rate from another link.
    """
    links = len(bandwidth)
    rate = np.zeros(passed.shape[1])
    free = bandwidth.copy()
    unknown = np.arange(passed.shape[1])
    while len(unknown):
        number = np.bincount(passed.ravel(), minlength=links)
        fair = free / np.maximum(number, 1)
        least = fair[passed[0]]
        for k in range(1, len(passed)):
            least = np.minimum(least, fair[passed[k]])
        slack = np.zeros(links)
        for k in range(len(passed)):
            less = (least < fair[passed[k]] * (1 - ALIKE)).astype(np.float64)
            slack += np.bincount(passed[k], less, links)
        filled = np.zeros(len(unknown), np.bool_)
        for k in range(len(passed)):
            filled |= slack[passed[k]] == 0
        rate[unknown[filled]] = least[filled]
        for k in range(len(passed)):
            free -= np.bincount(passed[k][filled], least[filled], links)
        free = np.maximum(free, 0)
        unknown = unknown[~filled]
        passed = passed[:, ~filled]
    return rate


def run(operations, state, flows, coarse):
    """Run all programs; return the number of times that the rates were computed."""
    size, n = len(state.now), len(flows.nbytes)
    woken = np.empty(2 * n + size, np.int64)
    pending = np.empty(n, np.int64)
    waiting = 0
    for rank in range(size):
        waiting = _advance(rank, operations, state, flows, pending, waiting)
    active = np.empty(0, np.int64)
    rate, end = np.empty(0), np.empty(0)
    now, events = 0.0, 0
    while waiting or len(active):
        coming = pending[:waiting]
        start = flows.start[coming]
        next_one = np.inf
        if waiting:
            next_one = start.min()
        if len(active):
            next_one = min(next_one, end.min())
        limit = next_one + max(coarse, 1e-9 * next_one)
        over = end <= limit
        number = 0
        for i in np.flatnonzero(over):
            m, passed = int(active[i]), float(end[i])
            now = max(now, passed)
            done = passed + flows.latency[m]
            number = _arrive(m, done, state, flows, woken, number)
            flows.sent[m] = True
            following = flows.after[m]
            if following >= 0:
                flows.start[following] = max(flows.start[following], passed)
                pending[waiting] = following
                waiting += 1
        for i in range(number):
            rank = int(woken[i])
            waiting = _advance(rank, operations, state, flows, pending, waiting)
        coming = pending[:waiting].copy()
        start = flows.start[coming]
        begins = start <= limit
        new = coming[begins]
        waiting -= len(new)
        pending[:waiting] = coming[~begins]
        if len(new):
            now = max(now, start[begins].max())
        # Bytes that the active messages have left now, at the rates that they had so far.
        stay = ~over
        left = np.concatenate((
            np.maximum(end[stay] - now, 0) * rate[stay], flows.nbytes[new].astype(np.float64)
        ))  # fmt: skip
        since = np.concatenate((np.minimum(end[stay], now), flows.start[new]))
        active = np.concatenate((active[stay], new))
        rate = _shares(flows.passed[:, active], flows.bandwidth)
        end = since + left / rate
        events += 1
    return events


@lru_cache(maxsize=1)
def compiled() -> Callable:
    """Return `run`, compiled by Numba if it is installed, and cached on disk if possible."""
    try:
        from numba import config, njit
        from numba.extending import register_jitable
    except ImportError:
        return run
    if config.DISABLE_JIT:
        return run
    for function in (_advance, _arrive, _shares):
        register_jitable(function)
    try:
        return njit(cache=True)(run)
    except RuntimeError:
        return njit(run)
