"""Refinement of an assignment: pairs of blocks, and owners of blocks, change ranks.

Each change lowers a penalty.  The penalty is the sum over the ranks of a high power of the traffic
that they send and receive.  It is a smooth substitute for the largest traffic.  Uneven work and
too many tokens raise the penalty.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.sharding.assignment import Assignment
from a2d_mpi.sharding.demand import Classes

# Each stage is (power of traffic, weight of uneven work, work over the mean above which work is
# uneven).  The first stages let moves make work uneven for a while; the last ones leave at most
# EVEN.
STAGES = ((8, 10.0, 1.04), (8, 60.0, 1.04), (16, 400.0, 1.045), (16, 3000.0, 1.045))
EVEN = 1.05
# The stage that is added if work is still uneven.
STRICT = (8, 1e6, 1.04)
# A rank owns at most this many times the mean number of tokens, if the blocks allow it.
_TOKENS = 1.05
_TRIES = 6  # moves that are tried for one rank: the moves with the largest gains
_GAIN = 1e-7  # with smaller gains, rounding would decide


def refine(trial: Assignment, steps: int, stages: tuple = STAGES) -> tuple[Assignment, int]:
    """Improve an assignment in stages of at most `steps` moves of pairs each.

    Parameters
    ----------
    trial : Assignment
        The start, which is changed.
    steps : int
    stages : tuple of (int, float, float)
        As in `STAGES`.

    Returns
    -------
    Assignment
        The assignment with the least traffic among the assignments whose work is within `EVEN` of
        the mean.  If no work is this even, it is the assignment with the most even work.
    int
        Number of moves that were tried.
    """
    documents = trial.demand.documents()[trial.demand.row]
    best, used = None, 0
    for power, weight, even in stages:
        used += move_pairs(trial, documents, steps, power, weight, even)
        move_owners(trial, power)
        key = merit(trial)
        if best is None or key < best[0]:
            best = (key, trial.owner.copy(), trial.rank.copy())
    return Assignment(trial.demand, trial.ranks, best[1], best[2]), used


def kicked(trial: Assignment, rng: np.random.Generator) -> Assignment:
    """Return a copy in which random rows and columns of pairs, and a block, leave a busy rank."""
    trial = trial.copy()
    busiest = np.argsort(-np.maximum(trial.received, trial.sent), kind="stable")
    source = int(rng.choice(busiest[: max(2, trial.ranks // 4)]))
    row, col = trial.demand.row, trial.demand.col
    for _ in range(int(rng.integers(2, 6))):
        pairs = np.flatnonzero(trial.rank == source)
        if not len(pairs):
            break
        line = row if rng.integers(2) else col
        strip = pairs[line[pairs] == line[rng.choice(pairs)]]
        near = np.unique(trial.rank[(row == row[strip[0]]) | (col == col[strip[0]])])
        near = near[near != source]
        if len(near):
            trial.move(strip, source, int(rng.choice(near)))
    own = np.flatnonzero(trial.owner == source)
    if len(own):
        a, b = rng.choice(own), rng.integers(len(trial.owner))
        trial.owner[[a, b]] = trial.owner[[b, a]]
        trial.count_traffic()
    return trial


def merit(trial: Assignment) -> tuple[float, float, float]:
    """Return a key by which better assignments come first: uneven work decides, then traffic.

    Work within `EVEN` of the mean counts as even.  If a rank has too many tokens, traffic counts
    more, because the sizes of blocks may force that.  Far too many tokens count as uneven work.
    """
    tokens = trial.tokens
    over = max(0.0, tokens.max() / max(tokens.mean(), 1e-300) - _TOKENS)
    uneven = max(trial.uneven, EVEN, 1 + over / 4)
    return uneven, trial.largest * (1 + 10 * over), trial.uneven


class _Penalty:
    """Powers of the traffic and squares of uneven work, as functions of a rank's numbers."""

    def __init__(self, trial: Assignment, power: int, weight: float, even: float) -> None:
        self.scale = 1 / max(trial.largest, 1.0)
        self.mean = max(trial.work.mean(), 1e-300)
        self.power, self.weight, self.even = power, weight, even

    def traffic(self, elements: np.ndarray) -> np.ndarray:
        x = np.maximum(elements, 0) * self.scale
        return _power(x, self.power)

    def slope(self, elements: np.ndarray) -> np.ndarray:
        x = np.maximum(elements * self.scale, 1e-9)
        return self.power * self.scale * _power(x, self.power) / x

    def work(self, pairs: np.ndarray) -> np.ndarray:
        over = self.over(pairs)
        return self.weight * over * (over + 0.1)

    def over(self, pairs: np.ndarray) -> np.ndarray:
        return np.maximum(0, pairs * (1 / self.mean) - self.even)

    def total(self, trial: Assignment) -> float:
        traffic = self.traffic(trial.received).sum() + self.traffic(trial.sent).sum()
        return float(traffic + self.work(trial.work).sum())


def _power(x: np.ndarray, power: int) -> np.ndarray:
    """Return x ** 8 or x ** 16 by squaring, which gives the same bits on every machine."""
    for _ in range(power.bit_length() - 1):
        x = x * x
    return x


def move_pairs(
    trial: Assignment, documents: np.ndarray, steps: int, power: int, weight: float, even: float
) -> int:
    """Move pairs from the most loaded rank to ranks where the sum of penalties falls most.

    A move takes one pair, or all pairs of a rank in one row of blocks, one column or one document.
    The estimated gain of a move is exact for the two ranks, and linear in the traffic of the
    owners.  The most promising moves are tried; a move is undone if the exact sum does not fall.
    Return the number of steps.
    """
    penalty = _Penalty(trial, power, weight, even)
    current = penalty.total(trial)
    settled = np.zeros(trial.ranks, bool)
    for step in range(steps):
        load = np.maximum(trial.received, trial.sent) * penalty.scale
        load += 5 * penalty.over(trial.work)
        load[settled] = -1
        source = int(np.argmax(load))
        if load[source] < 0:
            return step
        moved = False
        pairs = np.flatnonzero(trial.rank == source)
        if len(pairs):
            items = _items(trial, documents, pairs)
            gains = _gains(trial, penalty, pairs, items, source)
            for move in _lowest(gains.ravel()):
                item, target = divmod(int(move), trial.ranks)
                if gains[item, target] > -_GAIN:
                    break
                chosen = pairs[_members(items, item, len(pairs))]
                trial.move(chosen, source, target)
                total = penalty.total(trial)
                if total < current - _GAIN:
                    current, moved = total, True
                    break
                trial.move(chosen, target, source)
        if moved:
            settled[:] = False
        else:
            settled[source] = True
    return steps


def _items(trial: Assignment, documents: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return indicators of the pairs in each row, column and document: (items, pairs) float32."""
    place = np.arange(len(pairs))
    items = []
    for key in (trial.demand.row, trial.demand.col, documents):
        values, item = np.unique(key[pairs], return_inverse=True)
        member = np.zeros((len(values), len(pairs)), np.float32)
        member[item.ravel(), place] = 1
        items.append(member)
    return np.concatenate(items)


def _members(items: np.ndarray, item: int, pairs: int) -> np.ndarray:
    """Return the places of the pairs of an item; the first items are single pairs."""
    return np.array([item]) if item < pairs else np.flatnonzero(items[item - pairs])


def _lowest(values: np.ndarray) -> np.ndarray:
    places = np.argpartition(values, min(_TRIES, len(values) - 1))[:_TRIES]
    return places[np.lexsort((places, values[places]))]


def _gains(
    trial: Assignment, penalty: _Penalty, pairs: np.ndarray, items: np.ndarray, source: int
) -> np.ndarray:
    """Return the change of the penalties if a rank takes an item, (pairs + items, ranks)."""
    demand, ranks = trial.demand, np.arange(trial.ranks)
    work = demand.visible[pairs].astype(np.float64)
    work = np.concatenate([work, items @ work])
    both = penalty.slope(trial.received) + penalty.slope(trial.sent)
    slopes = both, penalty.slope(trial.sent)
    released, added = [], []
    change = np.zeros((len(work), trial.ranks))
    for classes, needs, weight, slope in zip(
        (demand.queries, demand.keys), trial.needs, trial.weights(), slopes
    ):
        used, index, weight = _used(classes, pairs, weight)
        used = np.concatenate([used, items @ used])
        owner = trial.owner[classes.block[index]]
        freed = ((used > 0) & (used == needs[source, index])) * (weight * (owner != source))
        new = ((needs[:, index] == 0) & (owner != ranks[:, None])) * weight
        is_used = (used > 0).astype(np.float64)
        released.append(freed.sum(axis=1))
        added.append(is_used @ new.T)
        change += is_used @ (new * slope[owner]).T
        change -= (freed @ slope[owner])[:, None]
    at_source = penalty.traffic(trial.received[source] - released[0] - released[1])
    at_source += penalty.traffic(trial.sent[source] - released[0])
    at_source += penalty.work(trial.work[source] - work)
    before = penalty.traffic(trial.received) + penalty.traffic(trial.sent)
    before += penalty.work(trial.work)
    change += (at_source - before[source])[:, None]
    change += penalty.traffic(trial.received + added[0] + added[1])
    change += penalty.traffic(trial.sent + added[0])
    change += penalty.work(trial.work + work[:, None]) - before
    change[:, source] = np.inf
    return change


def _used(
    classes: Classes, pairs: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the n classes that pairs need: (pairs, n) 0 or 1, indices (n,) and weights (n,)."""
    place, index = classes.of(pairs)
    index, column = np.unique(index, return_inverse=True)
    used = np.zeros((len(pairs), len(index)), np.float32)
    used[place, column.ravel()] = 1
    return used, index, weight[index]


def move_owners(trial: Assignment, power: int) -> None:
    """Let two blocks change owners, or one block move, while penalties fall."""
    queries, keys = trial.block_needs()
    to_all_q, to_all_k = queries.sum(axis=0), keys.sum(axis=0)
    # Changes of a rank's numbers if it owns a block instead of receiving it: (ranks, blocks).
    tokens, ranks = trial.demand.tokens.astype(np.float64), np.arange(trial.ranks)
    gain_r = to_all_q - 2 * queries - keys
    gain_s = to_all_q - 2 * queries + to_all_k - keys
    gain_t = np.broadcast_to(tokens, gain_r.shape)
    # An empty block of every rank, so that a swap with it moves one block.
    nothing = np.zeros((3, trial.ranks, trial.ranks))
    steps = np.concatenate([np.stack([gain_r, gain_s, gain_t]), nothing], axis=2)
    owner = np.concatenate([trial.owner, ranks])
    numbers = np.stack([trial.received, trial.sent, trial.tokens])
    scale = 1 / max(trial.largest, 1.0)
    most = max(_TOKENS * tokens.sum() / trial.ranks, 1.0)

    def penalty(x: np.ndarray) -> np.ndarray:
        traffic = _power(np.maximum(x[:2], 0) * scale, power).sum(axis=0)
        return traffic + 100 * np.maximum(0, x[2] / most - 1)

    for _ in range(30 * len(tokens)):
        before = penalty(numbers)
        load = numbers[:2].max(axis=0) * scale + 10 * np.maximum(0, numbers[2] / most - 1)
        for rank in np.argsort(-load, kind="stable")[: max(4, trial.ranks // 4)]:
            own = np.flatnonzero(owner[: len(tokens)] == rank)
            if not len(own):
                continue
            # Swap each block of this rank with each block of all ranks: (3, own, all).
            here = steps[:, rank, None, :] - steps[:, rank, own, None]
            there = steps[:, owner[None, :], own[:, None]]
            there = there - steps[:, owner, np.arange(len(owner))][:, None, :]
            change = penalty(numbers[:, rank, None, None] + here) - before[rank]
            change += penalty(numbers[:, None, owner] + there) - before[owner]
            change[:, owner == rank] = 0
            i, b = np.unravel_index(np.argmin(change), change.shape)
            if change[i, b] > -1e-6:
                continue
            for block, to in ((own[i], owner[b]), (b, rank)):
                numbers[:, owner[block]] -= steps[:, owner[block], block]
                numbers[:, to] += steps[:, to, block]
                owner[block] = to
            owner[len(tokens) :] = ranks
            break
        else:
            break
    trial.owner[:] = owner[: len(tokens)]
    trial.count_traffic()
