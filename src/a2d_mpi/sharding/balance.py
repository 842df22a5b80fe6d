"""A distribution for any mask: runs of tokens dealt so that the tiles of a grid have even areas.

The sequence is cut into equally long runs, the same number for every position of the grid.  The
visible pairs between runs are counted once; the area of the tile (r, c) is the sum over the runs
of row r and those of column c.  From a structured start (contiguous, zigzag, or dealt in turns)
runs of the largest tile change places with others until no tile is too large.  Few exchanges and
few long runs keep tiles in few plain shapes and the traffic small.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from a2d_mpi.masks.intervals import merged
from a2d_mpi.masks.mask import Mask
from a2d_mpi.sharding.blocks import cuts, visible_pairs
from a2d_mpi.sharding.distribution import shares

# Runs are halved until the largest area is at most this times the mean one, ...
EVEN = 1.02
# ... but not below the length of 8 a rank where it is at most this: that costs bytes and seconds.
_ENOUGH = 1.05
# The matrix of pairs between runs has this many rows at most: 32 MiB of float64.
MOST_RUNS = 2048
# Runs change places until the largest area is this times the mean one: each exchange costs bytes.
_ENDS = 1.018
# So many exchanges a run at most; so many of the largest tiles, and of the runs that add most to
# each, are looked at for one exchange.
_MOST_SWAPS, _TILES, _TRIED = 4, 4, 32
# Runs of a position, in the order in which they are tried.
_FINER = (1, 2, 4, 8, 16, 32, 64, 128)
# Areas are scaled to integers of this sum: then squares of areas and their sums are exact in
# float64, and every machine takes the same decisions whatever the order of its additions.
_TOTAL = 1 << 24

Runs = tuple[range, ...]


def balanced(mask: Mask, seqlen: int, rows: int, cols: int, heads: int = 1) -> tuple[Runs, ...]:
    """Deal runs of tokens to the ranks of a grid so that all tiles have about the same area.

    Parameters
    ----------
    mask : Mask
    seqlen : int
        N, the number of tokens.
    rows, cols : int
        R and C of the grid; ``P x 1`` is a ring.
    heads : int
        U, the ranks of one grid position, which share the runs of the position.

    Returns
    -------
    tuple of tuple of range
        The runs of every rank ``(r C + c) U + u``, ascending and not empty; together they are
        ``[0, seqlen)``.  A rank has at most one run's length more tokens than N / P.

    Raises
    ------
    ValueError
        If the grid has no ranks, `seqlen` is negative, or the mask has another length.
    """
    if min(rows, cols, heads) < 1 or seqlen < 0:
        raise ValueError(
            f"need seqlen >= 0 and at least one row, column and rank a position, "
            f"got {seqlen}, {rows} x {cols} and {heads}"
        )
    mask.check(seqlen)
    bounds, owner = deal(mask, seqlen, rows, cols)
    found = []
    for position in range(rows * cols):
        runs = _joined(bounds, np.flatnonzero(owner == position))
        found.extend(shares(runs, heads))
    return tuple(found)


@lru_cache(maxsize=8)  # for grids of the same ranks and other shapes
def pairs_of_cuts(mask: Mask, seqlen: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of equally long runs, and the visible pairs between any two of them."""
    bounds = cuts(seqlen, number)
    return bounds, visible_pairs(mask, bounds, bounds)


@lru_cache(maxsize=64)  # a search takes a second or two
def deal(mask: Mask, seqlen: int, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the runs and the position that has each."""
    positions = rows * cols
    most = max(1, min(MOST_RUNS, seqlen) // positions)
    best = None
    for each in _FINER:
        enough = EVEN if each <= 8 else _ENOUGH
        if best is not None and (each > most or best[0][0] <= enough):
            break
        bounds, pairs = pairs_of_cuts(mask, seqlen, each * positions)
        seen, scaled = pairs > 0, _scaled(pairs)
        for start in starts(each, positions):
            owner = _exchange(scaled, start, rows, cols)
            largest = uneven(pairs, owner, rows, cols)
            # Any even deal comes before all others; among even ones the bytes decide.
            key = (max(largest, EVEN), largest_traffic(seen, owner, rows, cols))
            if best is None or key < best[0]:
                best = (key, bounds, owner)
    return best[1], best[2]


def starts(each: int, positions: int) -> list[np.ndarray]:
    """Owners of runs: zigzag, contiguous, and in turns there and back; each has equally many."""
    run = np.arange(each * positions)
    found = [run // each]
    if each > 1:
        piece = run // (each // 2)
        found.insert(0, np.minimum(piece, 2 * positions - 1 - piece))
    if each > 2:
        turn, place = np.divmod(run, positions)
        found.append(np.where(turn % 2, positions - 1 - place, place))
    return found


def _scaled(pairs: np.ndarray) -> np.ndarray:
    total = pairs.sum()
    return np.rint(pairs * (_TOTAL / total)) if total > _TOTAL else pairs.astype(np.float64)


def _members(group: np.ndarray, groups: int) -> np.ndarray:
    """Indicator of the groups: (runs, groups) float64."""
    return (group[:, None] == np.arange(groups)).astype(np.float64)


def uneven(pairs: np.ndarray, owner: np.ndarray, rows: int, cols: int) -> float:
    """Largest over mean area of the tiles."""
    row, col = (_members(x, n) for x, n in zip(np.divmod(owner, cols), (rows, cols)))
    areas = row.T @ (pairs @ col)
    return float(areas.max() / areas.mean()) if areas.any() else 1.0


def _exchange(pairs: np.ndarray, owner: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Let pairs of runs change places until no tile is much larger than the mean.

    Of the runs that make the largest tile, and of all others, the two change places that lower
    the sum of the squared areas most.  If there are none, the next largest tiles are tried.

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
    by_col = pairs @ _members(col, cols)  # (runs, C): of the queries of a run in each column
    by_row = transposed @ _members(row, rows)  # (runs, R): of the keys of a run in each row
    areas = _members(row, rows).T @ by_col
    for _ in range(_MOST_SWAPS * len(owner)):
        # What does not depend on the tile.  `linear` is (runs, rows) or (runs, columns): the
        # product of the areas of a run with those of a row or column of tiles.
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
            p = by_col[a, col] - q - q[a] + by_col[:, ca[:, 0]].T  # y p of the notes, (a, runs)
            t = by_row[a, row] - k - k[a] + by_row[:, ra[:, 0]].T  # x t
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
    """Runs that the busiest rank sends or receives, counted whole, as many KV heads as heads."""
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


def _joined(bounds: np.ndarray, runs: np.ndarray) -> Runs:
    """Neighbouring runs as one, empty ones left out."""
    return tuple(merged(map(range, bounds[runs].tolist(), bounds[runs + 1].tolist())))
