"""Placement of blocks of tokens, and of the attention between them, for any mask and ranks.

Tokens are cut into blocks, which follow the borders of documents.  Each block has an owner, which
has its rows of q, k, v and out.  Each pair of a block of queries and a block of keys in which any
query sees any key is computed by one rank: it receives the queries that see a key there and
returns their partials, and it receives the keys and values that are seen.  The largest rank's
traffic is made small while visible pairs and tokens stay within 5 % of even.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.masks.mask import Mask
from a2d_mpi.sharding import starts
from a2d_mpi.sharding.assignment import Assignment
from a2d_mpi.sharding.blocks import along_documents
from a2d_mpi.sharding.demand import Demand, demand
from a2d_mpi.sharding.refinement import EVEN, STAGES, STRICT, kicked, merit, move_owners, refine

# Blocks a rank, and in all: few long blocks make few kernel calls; with fewer blocks
# one pair has several percent of a rank's work.
_BLOCKS_EACH, _MOST_EACH = 4, 8
_BLOCKS = 128
# Elements looked at by all steps of refinement together, some 150 ns each: 1.5 s on one core.  A
# step looks at as many as there are pairs, and takes as long as for so many more, and for so many
# more a rank; a random change takes as long as _KICK steps.
_BUDGET = 10_000_000
# And so many a token, but no less than this: what a placement may save grows with the length.
_BUDGET_TOKEN, _BUDGET_LEAST = 1000, 4_000_000
_STEP, _STEP_RANK = 6000, 150
_KICK = 20
# Starts that are kept in the first stages of refinement, where there is time for many and for few.
_KEPT = (8, 4, 2), (3, 2, 1)
_MANY = 1700
# Documents are short that have at most these shares of a rank's mean tokens and work.
_SMALL = (0.25, 0.5, 1.0, 2.0)
# Bisections try these shares of the ranks besides halves.
_UNEVEN = ((3, 4), (4,), (3, 5))
# So many grids are tried, those with work that refinement can make even.
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
        The same for the same arguments on machines of one kind; where ranks differ in their
        processors, let one rank place and share the result.

    Raises
    ------
    ValueError
        For no ranks or tokens, `kv_share` outside of (0, 1], or a mask of another
        length.

    Notes
    -----
    There are four blocks a rank, eight up to 128 in all, and more where single pairs are too large
    for even work; fewer than twice as many where documents end inside of them.
    """
    if min(ranks, seqlen) < 1:
        raise ValueError(f"need at least one token and one rank, got {seqlen} and {ranks}")
    if not 0 < kv_share <= 1:
        raise ValueError(f"kv_share is nheads_kv / nheads, in (0, 1]; got {kv_share}")
    mask.check(seqlen)
    usual = max(_BLOCKS_EACH * ranks, min(_BLOCKS, _MOST_EACH * ranks))
    for number in (usual, 2 * usual, 4 * usual):
        bounds = along_documents(mask, seqlen, min(number, seqlen))
        found = _best(demand(mask, bounds, kv_share), ranks)
        if found.uneven <= EVEN or 2 * number > seqlen:
            break
    return found


def _best(x: Demand, ranks: int) -> Assignment:
    """Refine several starts a little, fewer of them more, and the best one to the end."""
    if not len(x.row) or ranks == 1:
        owner = starts.contiguous(x, ranks)
        return Assignment(x, ranks, owner, owner[x.col])
    trials = _starts(x, ranks)
    for trial in trials:
        move_owners(trial, 16)
    budget = min(_BUDGET, max(_BUDGET_LEAST, _BUDGET_TOKEN * int(x.tokens.sum())))
    left = steps = budget // (len(x.row) + _STEP + _STEP_RANK * ranks)
    for kept, stage in zip(_KEPT[0] if steps > _MANY else _KEPT[1], STAGES):
        found = []
        for trial in sorted(trials, key=_promise)[:kept]:
            trial, used = refine(trial, steps // (3 * kept), (stage,))
            found.append(trial)
            left -= used
        trials = found
    best, used = refine(min(trials, key=merit), steps // (3 * len(STAGES)))
    left -= used
    rng = np.random.default_rng(0)
    for attempt in range(8):
        if best.uneven <= EVEN:
            break
        trial = kicked(best, rng) if attempt else best
        trial, used = refine(trial, max(steps // 6, 8 * ranks), (STRICT,))
        left -= used
        best = min(best, trial, key=merit)
    if best.uneven > EVEN:  # with two ranks refinement may give all to one of them
        best = min([best, *_starts(x, ranks)], key=merit)
    # What is left is spent on random changes of the best assignment, each refined.
    while left > 0 and best.largest > 0:
        trial, used = refine(kicked(best, rng), left, STAGES[1:])
        left -= used + _KICK
        best = min(best, trial, key=merit)
    return best


def _promise(trial: Assignment) -> float:
    """Traffic that refinement may come to: it levels ranks, and uneven work costs traffic."""
    return (trial.largest + trial.received.mean()) * (0.5 + 0.5 * max(trial.uneven, EVEN))


def _starts(x: Demand, ranks: int) -> list[Assignment]:
    """Starts that differ from each other."""
    trials = [starts.packed(x, ranks, s) for s in _SMALL]
    trials += [starts.packed(x, ranks, 0.5, u) for u in _UNEVEN]
    trials += sorted(starts.grids(x, ranks, _GRID_UNEVEN), key=_promise)[:_GRIDS]
    different = {t.rank.tobytes(): t for t in trials}
    return list(different.values())
