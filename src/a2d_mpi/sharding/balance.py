"""A distribution for any mask: runs of tokens dealt so that the tiles of a grid have even areas.

The sequence is cut into equally long runs, the same number for every position of the grid.  The
visible pairs between runs are counted once.  The area of the tile (r, c) is the sum over the runs
of queries in row r and the runs of keys in column c.  The search begins with a structured start
(contiguous, zigzag, or dealt back and forth).  Runs of the largest tile change places with others
until no tile is too large.  Few swaps and few long runs keep the shapes of tiles simple and the
traffic small.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from a2d_mpi.masks.compiled import CompiledMask
from a2d_mpi.masks.intervals import joined
from a2d_mpi.sharding.pairs import visible_pairs
from a2d_mpi.sharding.progressions import shares

# Runs are halved until the largest area is at most EVEN_AREA times the mean area.
EVEN_AREA = 1.02
# With 8 or more runs per rank, _ENOUGH times the mean area is enough: shorter runs cost bytes and
# seconds.
_ENOUGH = 1.05
# Most rows of the matrix of pairs between runs, which then takes 32 MiB of float64.
MOST_RUNS = 2048
# Runs change places until the largest area is _ENDS times the mean area: each swap costs bytes.
_ENDS = 1.018
# Most swaps per run.  One swap looks at the _TILES largest tiles, and in each of them at the
# _TRIED runs with the largest shares of its area.
_MOST_SWAPS, _TILES, _TRIED = 4, 4, 32
# Numbers of runs per position, in the order in which they are tried.
_FINER = (1, 2, 4, 8, 16, 32, 64, 128)
# Areas are scaled to integers with this sum.  Then squares of areas and their sums are exact in
# float64, and every machine takes the same decisions in any order of additions.
_TOTAL = 1 << 24

Ranges = tuple[range, ...]


@lru_cache(maxsize=8)  # up to 32 MiB each; the planner's grids share them
def pairs_of_cuts(seen: CompiledMask, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of `number` equal runs, and the visible pairs between any two runs."""
    bounds = np.arange(number + 1, dtype=np.int64) * seen.seqlen // number
    return bounds, visible_pairs(seen, bounds)


class Deal(NamedTuple):
    """Owners of runs of tokens, and how good they are.

    Attributes
    ----------
    bounds : (runs + 1,) int64
        Run i is the tokens ``[bounds[i], bounds[i + 1])``.
    owner : (runs,) int64
        Grid position that owns each run.
    work : float
        Largest area of a tile over the mean area.
    traffic : float
        Share of the runs that the busiest rank sends or receives, see `largest_traffic`.
    """

    bounds: np.ndarray
    owner: np.ndarray
    work: float
    traffic: float


def balanced(seen: CompiledMask, rows: int, cols: int, heads: int = 1) -> tuple[Ranges, ...]:
    """Deal runs of tokens to the ranks of a grid so that all tiles have about the same area.

    Parameters
    ----------
    seen : CompiledMask
        Of N queries and N keys.
    rows, cols : int
        R and C of the grid; ``P x 1`` is a ring.
    heads : int
        U, the number of ranks of one grid position, which share the runs of the position.

    Returns
    -------
    tuple of tuple of range
        The runs of every rank ``(r C + c) U + u``, ascending and not empty; together they are
        ``[0, N)``.  A rank has at most N / P tokens plus one run.
    """
    dealt, of_ranks = seen.once(deal, rows, cols), []
    for position in range(rows * cols):
        runs = np.flatnonzero(dealt.owner == position)
        # Neighbouring runs are joined, and empty runs are left out.
        tokens = joined(zip(dealt.bounds[runs].tolist(), dealt.bounds[runs + 1].tolist()))
        of_ranks.extend(shares(tuple(range(*x) for x in tokens), heads))
    return tuple(of_ranks)


def deal(seen: CompiledMask, rows: int, cols: int) -> Deal:
    """Deal equal runs to the positions of a grid so that tiles have about the same area.

    The search takes a second or two: see `CompiledMask.once`.
    """
    positions = rows * cols
    most = max(1, min(MOST_RUNS, seen.seqlen) // positions)
    best, found = None, []
    for each in _FINER:
        enough = EVEN_AREA if each <= 8 else _ENOUGH
        if best is not None and (each > most or best.work <= enough):
            break
        bounds, pairs = pairs_of_cuts(seen, each * positions)
        total = seen.area
        scaled = np.rint(pairs * (_TOTAL / total)) if total > _TOTAL else pairs.astype(np.float64)
        for start in starts(each, positions):
            owner = _swap_runs(scaled, start, rows, cols)
            found.append(measured(bounds, pairs, owner, rows, cols))
        # Even deals come first; among even deals the bytes decide.
        best = min(found, key=lambda x: (max(x.work, EVEN_AREA), x.traffic))
    return best


def measured(
    bounds: np.ndarray, pairs: np.ndarray, owner: np.ndarray, rows: int, cols: int
) -> Deal:
    """Return the deal with these owners; `pairs` are the visible pairs of runs, (runs, runs)."""
    row, col = (_members(x, n) for x, n in zip(np.divmod(owner, cols), (rows, cols)))
    areas = row.T @ (pairs @ col)
    work = float(areas.max() / areas.mean()) if areas.any() else 1.0
    return Deal(bounds, owner, work, largest_traffic(pairs > 0, owner, rows, cols))


def starts(each: int, positions: int) -> list[np.ndarray]:
    """Return owners of runs: zigzag, contiguous, and dealt back and forth over the positions.

    Every position owns `each` runs.  Zigzag needs at least 2 runs per position, and dealing back
    and forth needs 3.
    """
    run = np.arange(each * positions)
    owners = [run // each]
    if each > 1:
        piece = run // (each // 2)
        owners.insert(0, np.minimum(piece, 2 * positions - 1 - piece))
    if each > 2:
        turn, place = np.divmod(run, positions)
        owners.append(np.where(turn % 2, positions - 1 - place, place))
    return owners


def _members(group: np.ndarray, groups: int) -> np.ndarray:
    """Return the indicator matrix of the groups of runs, (runs, groups) float64."""
    return (group[:, None] == np.arange(groups)).astype(np.float64)


def _swap_runs(pairs: np.ndarray, owner: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Swap the owners of two runs until no tile is much larger than the mean.

    One of the two runs belongs to the largest tile.  Each swap lowers the sum of the squared areas
    as much as possible.  If no swap lowers it, the next largest tiles are tried.

    Notes
    -----
    With the indicators X of the rows and Y of the columns the areas are ``M = X^T W Y``.  Let run
    a at (r1, c1) and run b at (r2, c2) change places.  With ``x = e_r2 - e_r1``,
    ``y = e_c2 - e_c1``, ``p = (W_a - W_b) Y``, ``t = X^T (W^a - W^b)`` for the rows W_a and the
    columns W^a of W, and ``s = W_aa - W_ab - W_ba + W_bb``, the areas change by
    ``x (p + s y)^T + t y^T``.
    """
    row, col = (x.copy() for x in np.divmod(owner, cols))
    every, transposed = np.arange(len(owner)), np.ascontiguousarray(pairs.T)
    both, diagonal = pairs + transposed, np.diag(pairs)
    by_col = pairs @ _members(col, cols)  # (runs, C): pairs of a run's queries by column
    by_row = transposed @ _members(row, rows)  # (runs, R): pairs of a run's keys by row
    areas = _members(row, rows).T @ by_col
    for _ in range(_MOST_SWAPS * len(owner)):
        # These numbers do not depend on the tile.  `linear` is (runs, rows) or (runs, columns):
        # the product of the areas of a run with the areas of a row or column of tiles.
        q, k = by_col[every, col], by_row[every, row]
        linear_q, linear_k = by_col @ areas.T, by_row @ areas
        alone = linear_q[every, row] + linear_k[every, col]
        squares_q, squares_k = (np.einsum("ij,ij->i", x, x) for x in (by_col, by_row))
        swap = None
        for tile in np.argsort(-areas.ravel(), kind="stable")[:_TILES].tolist():
            r, c = divmod(tile, cols)
            if areas[r, c] <= areas.mean() * _ENDS:
                return row * cols + col
            share = by_col[:, c] * ((row == r) & (rows > 1))
            share += by_row[:, r] * ((col == c) & (cols > 1))
            a = np.argsort(-share, kind="stable")[:_TRIED]
            a = a[share[a] > 0, None]
            if not len(a):
                continue
            ra, ca = row[a], col[a]
            other_row, other_col = row != ra, col != ca
            s = (diagonal[a] + diagonal - both[a[:, 0]]) * other_col
            p = by_col[a, col] - q - q[a] + by_col[:, ca[:, 0]].T  # y p in the Notes, (a, runs)
            t = by_row[a, row] - k - k[a] + by_row[:, ra[:, 0]].T  # x t in the Notes
            gain = linear_q[a, row] + linear_q[:, ra[:, 0]].T - alone
            gain += linear_k[a, col] + linear_k[:, ca[:, 0]].T - alone[a]
            gain += s * (areas[row, col] - areas[ra, col] - areas[row, ca] + areas[ra, ca])
            distance = squares_q[a] + squares_q - 2 * by_col[a[:, 0]] @ by_col.T
            gain += other_row * (distance + 2 * s * (s + p) + other_col * t * (p + 2 * s))
            distance = squares_k[a] + squares_k - 2 * by_row[a[:, 0]] @ by_row.T
            gain += other_col * distance  # half of the change of the sum of squares
            least = int(np.argmin(gain))
            if gain.flat[least] < 0:
                i, b = divmod(least, len(owner))
                swap = int(a[i, 0]), b
                break
        if swap is None:
            break
        a, b = swap
        step = transposed[a] - transposed[b]
        by_col[:, col[b]] += step
        by_col[:, col[a]] -= step
        step = pairs[a] - pairs[b]
        by_row[:, row[b]] += step
        by_row[:, row[a]] -= step
        for place in (row, col):
            place[[a, b]] = place[[b, a]]
        areas = _members(row, rows).T @ by_col
    return row * cols + col


def largest_traffic(seen: np.ndarray, owner: np.ndarray, rows: int, cols: int) -> float:
    """Return the share of the runs that the busiest rank sends or receives.

    A run counts as a whole if any of its tokens travels.  nheads_kv is taken to be nheads.
    """
    row, col = np.divmod(owner, cols)
    in_row, in_col = _members(row, rows), _members(col, cols)
    queries = (seen @ in_col > 0).astype(np.float64)  # (runs, C): needed in the column
    keys = (seen.T @ in_row > 0).astype(np.float64)  # (runs, R): needed in the row
    every = np.arange(len(owner))
    here = queries[every, col], keys[every, row]
    positions = rows * cols
    own = [np.bincount(owner, x, positions).reshape(rows, cols) for x in here]
    arriving = in_row.T @ queries - own[0], keys.T @ in_col - own[1]
    leaving = [
        np.bincount(owner, x.sum(axis=1) - y, positions).reshape(rows, cols)
        for x, y in zip((queries, keys), here)
    ]
    received = arriving[0] + leaving[0] + 2 * arriving[1]
    sent = arriving[0] + leaving[0] + 2 * leaving[1]
    return float(np.maximum(received, sent).max() / len(owner))
