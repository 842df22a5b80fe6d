"""A distribution for any mask: runs of tokens dealt so that the tiles of a grid have even areas.

The sequence is cut into equally long runs, the same number for every position of the grid.  The
visible pairs between runs are counted once; the area of the tile (r, c) is the sum over the runs
of row r and those of column c.  From a structured start (contiguous, zigzag, or dealt in turns)
pairs of runs change places while that lowers the sum of the squared areas.  Few long runs are
tried first, as they keep tiles in few plain shapes and the traffic small.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.masks.intervals import merged
from a2d_mpi.masks.mask import Mask
from a2d_mpi.sharding.blocks import cuts, visible_pairs
from a2d_mpi.sharding.distribution import shares

# Runs are halved until the largest area is at most this times the mean one, ...
_EVEN = 1.02
# ... but not below the length of 8 a rank where it is at most this: that costs bytes and seconds.
_ENOUGH = 1.05
# The matrix of pairs between runs has this many rows at most: 32 MiB of float64.
_MOST_RUNS = 2048
_SWEEPS = 4
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
    bounds, owner = _deal(mask, seqlen, rows, cols)
    found = []
    for position in range(rows * cols):
        runs = _joined(bounds, np.flatnonzero(owner == position))
        found.extend(shares(runs, heads))
    return tuple(found)


def _deal(mask: Mask, seqlen: int, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the runs and the position that has each."""
    positions = rows * cols
    most = max(1, min(_MOST_RUNS, seqlen) // positions)
    best = None
    for each in _FINER:
        enough = _EVEN if each <= 8 else _ENOUGH
        if best is not None and (each > most or best[0][0] <= enough):
            break
        bounds = cuts(seqlen, each * positions)
        pairs = visible_pairs(mask, bounds, bounds)
        seen = pairs > 0
        for start in _starts(each, positions):
            owner = _exchange(_scaled(pairs), start, rows, cols)
            uneven = _uneven(pairs, owner, rows, cols)
            # Any even deal comes before all others; among even ones the bytes decide.
            key = (max(uneven, _EVEN), _largest_traffic(seen, owner, rows, cols))
            if best is None or key < best[0]:
                best = (key, bounds, owner)
    return best[1], best[2]


def _starts(each: int, positions: int) -> list[np.ndarray]:
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


def _uneven(pairs: np.ndarray, owner: np.ndarray, rows: int, cols: int) -> float:
    """Largest over mean area of the tiles."""
    row, col = (_members(x, n) for x, n in zip(np.divmod(owner, cols), (rows, cols)))
    areas = row.T @ (pairs @ col)
    return float(areas.max() / areas.mean()) if areas.any() else 1.0


def _exchange(pairs: np.ndarray, owner: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Let pairs of runs change places while this makes the areas more even.

    Notes
    -----
    With the indicators X of the rows and Y of the columns the areas are ``M = X^T W Y``.  Let run
    a at (r1, c1) and run b at (r2, c2) change places.  With ``x = e_r2 - e_r1``,
    ``y = e_c2 - e_c1``, ``p = (W_a - W_b) Y``, ``t = X^T (W^a - W^b)`` for the rows W_a and the
    columns W^a of W, and ``s = W_aa - W_ab - W_ba + W_bb``, the areas change by
    ``x (p + s y)^T + t y^T``.  The change of the sum of their squares is computed for all b at
    once.
    """
    row, col = (x.copy() for x in np.divmod(owner, cols))
    transposed = np.ascontiguousarray(pairs.T)
    diagonal = np.diag(pairs).copy()
    every = np.arange(len(owner))
    by_col = pairs @ _members(col, cols)  # (runs, C): of the queries of a run in each column
    by_row = transposed @ _members(row, rows)  # (runs, R): of the keys of a run in each row
    areas = _members(row, rows).T @ by_col
    mean = areas.mean()
    for _ in range(_SWEEPS):
        changed = False
        largest = areas.max(axis=1)[row] + areas.max(axis=0)[col]
        for a in np.argsort(-largest, kind="stable"):
            if areas.max() <= mean * (1 + (_EVEN - 1) / 2):
                return row * cols + col
            r1, c1 = row[a], col[a]
            p = by_col[a] - by_col
            t = by_row[a] - by_row
            dr, dc = row != r1, col != c1
            s = (diagonal[a] - pairs[a] - transposed[a] + diagonal) * dc
            old1, old2 = p[:, c1], p[every, col]
            new1, new2 = old1 - s, old2 + s
            row_step = (areas[row] - areas[r1]) * dr[:, None]
            col_step = (areas.T[col] - areas[:, c1]) * dc[:, None]
            inner = np.einsum("bc,bc->b", row_step, p) + np.einsum("br,br->b", col_step, t)
            inner += s * (row_step[every, col] - row_step[:, c1])
            squares = dr * (
                np.einsum("bc,bc->b", p, p)
                + dc * (new1 * new1 + new2 * new2 - old1 * old1 - old2 * old2)
            )
            squares += dc * np.einsum("br,br->b", t, t)
            squares += dr * dc * (t[every, row] - t[:, r1]) * (new2 - new1)
            gain = inner + squares  # half of the change of the sum of squares
            b = int(np.argmin(gain))
            if gain[b] >= 0:
                continue
            changed = True
            r2, c2 = row[b], col[b]
            step = transposed[a] - transposed[b]
            by_col[:, c2] += step
            by_col[:, c1] -= step
            step = pairs[a] - pairs[b]
            by_row[:, r2] += step
            by_row[:, r1] -= step
            row[a], col[a], row[b], col[b] = r2, c2, r1, c1
            areas = _members(row, rows).T @ by_col
        if not changed:
            break
    return row * cols + col


def _largest_traffic(seen: np.ndarray, owner: np.ndarray, rows: int, cols: int) -> float:
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
