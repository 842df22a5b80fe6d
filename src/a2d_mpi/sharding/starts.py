"""Structured starts of an assignment of blocks of tokens to ranks.

Refinement makes local changes, so the start has to have the right overall shape.  *Bisection* cuts
the pairs of blocks along rows or columns, repeatedly, into one compact region per rank.  On a
causal mask these regions resemble the squares of the triangle partition, for any number of ranks.
*Packing* bisects the pairs of long documents only.  It gives each short document to one rank, and
evens out tokens and work.  *Grids* are the grids of Attention2D and rings.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.sharding.assignment import Assignment
from a2d_mpi.sharding.demand import Demand


def contiguous(demand: Demand, ranks: int) -> np.ndarray:
    """Return owners in the order of the sequence, (blocks,) int64."""
    middle = demand.bounds[:-1] + demand.bounds[1:]
    return np.minimum(middle * ranks // (2 * max(int(demand.bounds[-1]), 1)), ranks - 1)


def zigzag(demand: Demand, ranks: int) -> np.ndarray:
    """Return owners in the order of the sequence, and back again, (blocks,) int64."""
    piece = contiguous(demand, 2 * ranks)
    return np.minimum(piece, 2 * ranks - 1 - piece)


def grids(demand: Demand, ranks: int, uneven: float) -> list[Assignment]:
    """Return contiguous and zigzag grids of all shapes, up to `uneven` times the mean work."""
    trials = []
    for owner in (contiguous(demand, ranks), zigzag(demand, ranks)):
        for rows in range(1, ranks + 1):
            cols = ranks // rows
            if rows * cols != ranks:
                continue
            rank = owner[demand.row] // cols * cols + owner[demand.col] % cols
            work = np.bincount(rank, demand.visible, ranks)
            if work.max() <= uneven * work.mean():
                trials.append(Assignment(demand, ranks, owner, rank))
    return trials


def packed(
    demand: Demand, ranks: int, small: float, fractions: tuple[int, ...] = ()
) -> Assignment:
    """Give each short document to one rank, and bisect the pairs of the long documents.

    Parameters
    ----------
    demand : Demand
    ranks : int
    small : float
        A document is short if it has at most this share of a rank's mean work and mean tokens.
    fractions : tuple of int
        As in `bisected`.
    """
    document = demand.documents()
    number = int(document[-1]) + 1
    tokens = np.bincount(document, demand.tokens, number)
    work = np.bincount(document[demand.row], demand.visible, number)
    mean_tokens = max(tokens.sum() / ranks, 1e-300)
    mean_work = max(work.sum() / ranks, 1e-300)
    short = (work <= small * mean_work) & (tokens <= small * mean_tokens)
    rank = np.zeros(len(demand.row), np.int64)
    long = np.flatnonzero(~short[document[demand.row]])
    rank[long] = bisected(demand, long, ranks, fractions)
    owner = _owners_of_long(demand, rank, long, np.flatnonzero(~short[document]), ranks)
    has_tokens = np.bincount(owner[~short[document]], demand.tokens[~short[document]], ranks)
    has_work = np.bincount(rank[long], demand.visible[long], ranks)
    longest_first = np.flatnonzero(short)
    for x in longest_first[np.argsort(-tokens[short], kind="stable")]:
        after_tokens = (has_tokens + tokens[x]) / mean_tokens
        after_work = (has_work + work[x]) / mean_work
        over = 3 * np.maximum(0, after_tokens - 1.02) + np.maximum(0, after_work - 1)
        to = int(np.argmin(over + 0.1 * after_tokens + 0.1 * after_work))
        owner[document == x] = to
        rank[document[demand.row] == x] = to
        has_tokens[to] += tokens[x]
        has_work[to] += work[x]
    return Assignment(demand, ranks, owner, rank)


def _owners_of_long(
    demand: Demand, rank: np.ndarray, pairs: np.ndarray, blocks: np.ndarray, ranks: int
) -> np.ndarray:
    """Give the blocks of long documents to ranks that need their tokens, in even shares."""
    use = np.zeros((ranks, len(demand.tokens)))
    np.add.at(use, (rank[pairs], demand.row[pairs]), 1.0)
    np.add.at(use, (rank[pairs], demand.col[pairs]), 2 * demand.kv_share)
    owner = np.zeros(len(demand.tokens), np.int64)
    has = np.zeros(ranks)
    share = max(demand.tokens[blocks].sum() / ranks, 1e-300)
    for b in blocks[np.argsort(-demand.tokens[blocks], kind="stable")]:
        n = demand.tokens[b]
        over = np.maximum(0, has + n - 1.1 * max(share, n)) / share
        owner[b] = np.argmax(use[:, b] - 3 * over - 0.5 * has / share)
        has[owner[b]] += n
    return owner


def bisected(
    demand: Demand, pairs: np.ndarray, ranks: int, fractions: tuple[int, ...] = ()
) -> np.ndarray:
    """Cut pairs of blocks into one region of equal work for every rank.

    Parameters
    ----------
    demand : Demand
    pairs : (n,) int64
        The pairs of blocks that are cut.
    ranks : int
    fractions : tuple of int
        Besides halves of the ranks, try cuts that give ``1 / x`` of the ranks to one side.

    Returns
    -------
    (n,) int64
        The rank of each pair.
    """
    rank = np.zeros(len(pairs), np.int64)
    blocks = len(demand.tokens)
    rows = np.bincount(demand.queries.block, demand.queries.weight, blocks)
    cols = np.bincount(demand.keys.block, demand.keys.weight, blocks) * demand.kv_share
    work = demand.visible.astype(np.float64)
    waiting = [(np.arange(len(pairs)), 0, ranks)]
    while waiting:
        here, first, number = waiting.pop()
        if number == 1 or not len(here):
            rank[here] = first
            continue
        best = None
        region = pairs[here]
        row, col = demand.row[region], demand.col[region]
        for along, across in ((row, col), (row, -col), (col, row), (col, -row)):
            order = np.lexsort((across, along))
            done = np.cumsum(work[region[order]])
            for below in _sides(number, fractions):
                at = 1 + int(np.argmin(np.abs(done - done[-1] * below / number)))
                cost = 0.0
                for side, n in ((order[:at], below), (order[at:], number - below)):
                    height = rows[np.unique(row[side])].sum()
                    width = cols[np.unique(col[side])].sum()
                    cost += _estimate(height, width, work[region[side]].sum(), n)
                if best is None or cost < best[0]:
                    best = cost, order[:at], order[at:], below
        _, lower, upper, below = best
        waiting += [(here[lower], first, below), (here[upper], first + below, number - below)]
    return rank


def _sides(number: int, fractions: tuple[int, ...]) -> list[int]:
    """Return the numbers of ranks that one side of a cut may get."""
    small = {max(1, number // x) for x in (2, *fractions)}
    return sorted(small | {number - x for x in small})


def _estimate(height: float, width: float, work: float, ranks: int) -> float:
    """Estimate the queries and keys that ranks need if they divide a region into squares.

    One rank needs all queries and keys of the region.
    """
    if ranks == 1 or not work:
        return height + width
    side = min(height, np.sqrt(work / ranks))
    other = min(width, work / ranks / max(side, 1e-9))
    return ranks * (min(height, max(side, work / ranks / max(other, 1e-9))) + other)
