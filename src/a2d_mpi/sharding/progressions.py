"""Sets of integers as arithmetic progressions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np


def ranks_among(pieces: Sequence[Sequence[range]]) -> list[list[range]]:
    """Return the positions of the integers of each piece in the sorted union of all pieces.

    Parameters
    ----------
    pieces : sequence of sequence of range
        Ascending progressions.  None is empty, and no integer occurs twice.
    """
    places: list[list[range]] = [[] for _ in pieces]
    ordered = sorted(
        ((r, i) for i, piece in enumerate(pieces) for r in piece), key=lambda x: x[0].start
    )
    if all(a[-1] < b[0] for (a, _), (b, _) in pairwise(ordered)):
        done = 0
        for r, i in ordered:
            adjoins = places[i] and places[i][-1].stop == done
            first = places[i].pop().start if adjoins else done
            done += len(r)
            places[i].append(range(first, done))
        return places
    first, last = ordered[0][0].start, max(r[-1] for r, _ in ordered)
    step = math.gcd(*(r.start - first for r, _ in ordered), *(r.step for r, _ in ordered))
    if sum(len(r) for r, _ in ordered) == (last - first) // step + 1:  # the union is a progression
        return [
            [range((r.start - first) // step, (r[-1] - first) // step + 1, r.step // step)
             for r in piece]
            for piece in pieces
        ]  # fmt: skip
    integers = [concatenated(piece) for piece in pieces]
    order = np.argsort(np.concatenate(integers))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ends = np.cumsum([len(x) for x in integers])
    return [progressions(x) for x in np.split(place, ends[:-1])]


def concatenated(runs: Iterable[range]) -> np.ndarray:
    """Return the integers of progressions one after the other, (n,) int64."""
    arrays = [np.arange(r.start, r.stop, r.step) for r in runs]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def progressions(x: np.ndarray) -> list[range]:
    """Divide integers in ascending order into few arithmetic progressions."""
    steps, runs, first = np.diff(x), [], 0
    changes = np.flatnonzero(np.diff(steps)) + 1
    while first < len(x):
        if first == len(x) - 1:
            runs.append(range(int(x[first]), int(x[first]) + 1))
            break
        step = int(steps[first])
        later = changes[np.searchsorted(changes, first, side="right") :]
        last = int(later[0]) if len(later) else len(x) - 1
        runs.append(range(int(x[first]), int(x[last]) + 1, step))
        first = last + 1
    return runs


def share(pieces: tuple[range, ...], place: int, places: int) -> tuple[range, ...]:
    """Cut tokens into `places` equal consecutive shares, and return the share `place`."""
    n, done, own = sum(map(len, pieces)), 0, []
    begin, end = n * place // places, n * (place + 1) // places
    for piece in pieces:
        own.append(piece[max(0, begin - done) : max(0, end - done)])
        done += len(piece)
    return tuple(own)


def shares(runs: tuple[range, ...], places: int) -> list[tuple[range, ...]]:
    """Cut tokens into `places` equal consecutive shares, without empty runs."""
    return [tuple(filter(None, share(runs, i, places))) for i in range(places)]
