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


class Actions(NamedTuple):
    """Posts and waits of all ranks, one rank after the other; there are A of them."""

    first: np.ndarray  # (P + 1,): index of each rank's first action
    waits: np.ndarray  # (A,) bool: True for a wait, False for a post
    delay: np.ndarray  # (A,) s that the rank is busy before the action
    work: np.ndarray  # (A,) s of the rank's core, to receive the messages of a wait
    begin: np.ndarray  # (A + 1,): index in `numbers` of each action's first message
    numbers: np.ndarray  # messages of the actions
    reached: np.ndarray  # (A,) bool: the rank has reached the action
    missing: np.ndarray  # (A,): messages of a wait that have not arrived
    end: np.ndarray  # (A,) s: latest arrival so far; in the end, when the wait ended


class Ranks(NamedTuple):
    """State of every rank, (P,)."""

    at: np.ndarray  # next action
    now: np.ndarray  # s: time of the rank
    idle: np.ndarray  # s of waiting in which the core was free
    waited: np.ndarray  # s spent in waits


class Flows(NamedTuple):
    """Messages and links, and the state of every message."""

    nbytes: np.ndarray  # (n,) float64
    passed: np.ndarray  # (links of a message, n): links that each message passes
    latency: np.ndarray  # (n,) s
    bandwidth: np.ndarray  # (links,) bytes/s
    waiter: np.ndarray  # (2, n): action in which its source, its receiver waits for it; -1: none
    ends: np.ndarray  # (2, n): ranks of its source and its receiver
    posted: np.ndarray  # (n,): number of sides that have posted it
    start: np.ndarray  # (n,) s: both sides have posted it, and the message before it has passed
    pair: np.ndarray  # (n,): number of the pair (source, receiver)
    last: np.ndarray  # (pairs,): latest message of a pair that both sides have posted; -1: none
    after: np.ndarray  # (n,): message of the same pair that waits for this one; -1: none
    sent: np.ndarray  # (n,) bool: all bytes have passed


def _advance(rank, actions, ranks, flows, pending, count):
    """Advance a rank until it must wait; messages that may start are appended to `pending`."""
    now = ranks.now[rank]
    a = ranks.at[rank]
    while a < actions.first[rank + 1]:
        if not actions.reached[a]:
            actions.reached[a] = True
            now += actions.delay[a]
        if actions.waits[a]:
            if actions.missing[a]:
                break
            ready = max(now, actions.end[a])
            idle = ranks.idle[rank] + ready - now
            paid = min(idle, actions.work[a])  # work that the core did while the rank waited
            ranks.idle[rank] = idle - paid
            ready += actions.work[a] - paid
            ranks.waited[rank] += ready - now
            actions.end[a] = now = ready
        else:
            for i in range(actions.begin[a], actions.begin[a + 1]):
                m = actions.numbers[i]
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
        a += 1
    ranks.now[rank] = now
    ranks.at[rank] = a
    return count


def _arrive(m, done, actions, flows, woken, number):
    """Mark a message as arrived; ranks whose waits are over are appended to `woken`."""
    for side in range(2):
        a = flows.waiter[side][m]
        if a >= 0:
            actions.missing[a] -= 1
            actions.end[a] = max(actions.end[a], done)
            if actions.missing[a] == 0 and actions.reached[a]:
                woken[number] = flows.ends[side][m]
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
        number = np.bincount(passed[0], minlength=links)
        for k in range(1, len(passed)):
            number = number + np.bincount(passed[k], minlength=links)
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


def run(actions, ranks, flows, coarse):
    """Run all programs; return the number of times that the rates were computed."""
    size, n = len(ranks.now), len(flows.nbytes)
    woken = np.empty(2 * n + size, np.int64)
    pending = np.empty(n, np.int64)
    waiting = 0
    for rank in range(size):
        waiting = _advance(rank, actions, ranks, flows, pending, waiting)
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
            number = _arrive(m, passed + flows.latency[m], actions, flows, woken, number)
            flows.sent[m] = True
            following = flows.after[m]
            if following >= 0:
                flows.start[following] = max(flows.start[following], passed)
                pending[waiting] = following
                waiting += 1
        for i in range(number):
            waiting = _advance(int(woken[i]), actions, ranks, flows, pending, waiting)
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
