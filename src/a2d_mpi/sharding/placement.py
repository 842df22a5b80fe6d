"""Placement of blocks of tokens, and of the attention between them, for any mask and ranks.

The sequence is cut into blocks, which follow the borders of documents.  Each block has an owner,
which has its rows of q, k, v and out.  Each pair of a block of queries and a block of keys with a
visible pair is computed by one rank.  This rank receives the queries of the pair that see one of
its keys, and returns their partial results.  It also receives the keys that these queries see, and
their values.
The optimiser lowers the traffic of the busiest rank.  Visible pairs and tokens of a rank stay
within 5 % of the mean.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.masks.mask import Mask
from a2d_mpi.sharding import starts
from a2d_mpi.sharding.assignment import Assignment
from a2d_mpi.sharding.blocks import along_documents
from a2d_mpi.sharding.demand import Demand, demand
from a2d_mpi.sharding.refinement import EVEN, STAGES, STRICT, kicked, merit, move_owners, refine

# Blocks per rank, and their total.  Few long blocks make few kernel calls.  With fewer blocks, one
# pair would hold several percent of a rank's work.
_BLOCKS_EACH, _MOST_EACH = 4, 8
_BLOCKS = 128
# Most elements that all moves of the refinement visit, at about 150 ns each: 1.5 s on one core.
_BUDGET = 10_000_000
# The budget per token, and its least value: long sequences can save more.
_BUDGET_TOKEN, _BUDGET_LEAST = 1000, 4_000_000
# A move visits one element per pair of blocks.  The rest of a move takes as long as _MOVE elements
# and _MOVE_RANK elements per rank.  A random change takes as long as _KICK moves.
_MOVE, _MOVE_RANK = 6000, 150
_KICK = 20
# Starts that remain after each of the first stages of refinement, with more than _MANY moves and
# with fewer.
_KEPT = (8, 4, 2), (3, 2, 1)
_MANY = 1700
# A document is short if it has at most this share of a rank's mean tokens and work.  All of these
# shares are tried.
_SMALL = (0.25, 0.5, 1.0, 2.0)
# Bisections try these fractions 1 / x of the ranks besides halves.
_FRACTIONS = ((3, 4), (4,), (3, 5))
# Number of grids that are tried, and the most uneven work of a grid (over the mean).
_GRIDS, _GRID_UNEVEN = 2, 1.5


def place(mask: Mask, seqlen: int, ranks: int, kv_share: float = 1.0) -> Assignment:
    """Place the blocks of a sequence and their pairs on ranks.

    Parameters
    ----------
    mask : Mask
    seqlen : int
        N, the number of tokens.
    ranks : int
        P, the number of ranks.
    kv_share : float
        ``nheads_kv / nheads``.

    Returns
    -------
    Assignment
        The result depends on the arguments alone if all machines have the same kind of processor.
        If processors differ, let one rank compute the placement and send it to the others.

    Raises
    ------
    ValueError
        If there are no ranks or tokens, `kv_share` is outside of (0, 1], or the mask has another
        length.

    Notes
    -----
    There are 128 blocks, but at least four and at most eight per rank.  If single pairs are too
    large for even work, there are two or four times as many.  Borders of documents inside blocks
    increase the number, but do not double it.
    """
    if min(ranks, seqlen) < 1:
        raise ValueError(
            f"need at least one token and one rank, got {seqlen} tokens and {ranks} ranks"
        )
    if not 0 < kv_share <= 1:
        raise ValueError(
            f"kv_share (nheads_kv / nheads) must be above 0 and at most 1, got {kv_share}"
        )
    mask.check(seqlen)
    usual = max(_BLOCKS_EACH * ranks, min(_BLOCKS, _MOST_EACH * ranks))
    for number in (usual, 2 * usual, 4 * usual):
        bounds = along_documents(mask, seqlen, min(number, seqlen))
        assignment = _best(demand(mask, bounds, kv_share), ranks)
        if assignment.uneven <= EVEN or 2 * number > seqlen:
            break
    return assignment


def _best(needs: Demand, ranks: int) -> Assignment:
    """Refine many starts with few moves, fewer starts with more moves, and the best to the end."""
    if not len(needs.row) or ranks == 1:
        owner = starts.contiguous(needs, ranks)
        return Assignment(needs, ranks, owner, owner[needs.col])
    trials = _starts(needs, ranks)
    for trial in trials:
        move_owners(trial, 16)
    budget = min(_BUDGET, max(_BUDGET_LEAST, _BUDGET_TOKEN * int(needs.tokens.sum())))
    left = moves = budget // (len(needs.row) + _MOVE + _MOVE_RANK * ranks)
    for kept, stage in zip(_KEPT[0] if moves > _MANY else _KEPT[1], STAGES):
        refined = []
        for trial in sorted(trials, key=_promise)[:kept]:
            trial, used = refine(trial, moves // (3 * kept), (stage,))
            refined.append(trial)
            left -= used
        trials = refined
    best, used = refine(min(trials, key=merit), moves // (3 * len(STAGES)))
    left -= used
    rng = np.random.default_rng(0)
    for attempt in range(8):
        if best.uneven <= EVEN:
            break
        trial = kicked(best, rng) if attempt else best
        trial, used = refine(trial, max(moves // 6, 8 * ranks), (STRICT,))
        left -= used
        best = min(best, trial, key=merit)
    if best.uneven > EVEN:  # with two ranks, refinement may give all pairs to one rank
        best = min([best, *_starts(needs, ranks)], key=merit)
    # Spend the remaining moves on random changes of the best assignment, and refine each change.
    while left > 0 and best.largest > 0:
        trial, used = refine(kicked(best, rng), left, STAGES[1:])
        left -= used + _KICK
        best = min(best, trial, key=merit)
    return best


def _promise(trial: Assignment) -> float:
    """Estimate the traffic after refinement.  It evens out the ranks, which costs traffic."""
    return (trial.largest + trial.received.mean()) * (0.5 + 0.5 * max(trial.uneven, EVEN))


def _starts(needs: Demand, ranks: int) -> list[Assignment]:
    """Return starts that differ from each other."""
    trials = [starts.packed(needs, ranks, s) for s in _SMALL]
    trials += [starts.packed(needs, ranks, 0.5, x) for x in _FRACTIONS]
    trials += sorted(starts.grids(needs, ranks, _GRID_UNEVEN), key=_promise)[:_GRIDS]
    different = {t.rank.tobytes(): t for t in trials}
    return list(different.values())
