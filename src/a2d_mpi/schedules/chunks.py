"""The chunks in which shards travel, and the order of a rank's work on its own shard."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

import numpy as np

from a2d_mpi.masks.intervals import Runs, cut, keys_per_query, queries_per_key, size
from a2d_mpi.masks.mask import Causal, Full
from a2d_mpi.schedules.group import Group
from a2d_mpi.sharding.distribution import Distribution
from a2d_mpi.sharding.pairs import causal_share
from a2d_mpi.sharding.progressions import concatenated

GRAIN = 128  # tokens: a shard of at least 2 GRAIN tokens is cut at a multiple of GRAIN
FIRST_SHARE = 0.6  # share of the work on a rank's own shard that comes before all other work


def chunked(places: Runs, ranks: int) -> list[Runs]:
    """Cut places into the chunks that travel along a row or column of `ranks` ranks.

    Among more than two ranks a shard is a small share of the traffic, and travels as one chunk.
    Between two ranks it is all of the traffic, and travels as two chunks.  With one chunk the
    receiver could compute nothing before the whole message arrives.  The sender of a result could
    send nothing before the whole result is computed.
    """
    n = size(places)
    if ranks == 2 and n >= 2 * GRAIN:
        middle = GRAIN * round(n / 2 / GRAIN)
        return [cut(places, 0, middle), cut(places, middle, n)]
    return [places] if n else []


def split_own(
    group: Group, rank: int, of_keys: bool, others: tuple[int, ...], returning: int
) -> list[Runs]:
    """Cut a rank's shard into the tokens that it computes first and the tokens for the end.

    Parameters
    ----------
    group : Group
    rank : int
        Rank in the group.
    of_keys : bool
        Whether to cut the shard of keys; otherwise the shard of queries.
    others : tuple of int
        Owners of the tokens on the other side of the tile.
    returning : int
        Number of ranks of the row or column along which partial results travel.  With one rank no
        partial results travel at the end, and the shard is not cut.
    """
    places = group.all_places(of_keys, rank)
    n = size(places)
    if returning > 1 and n >= 2 * GRAIN:
        middle = GRAIN * round(_first_tokens(group, rank, of_keys, others, n) / GRAIN)
        if 0 < middle < n:
            return [((0, middle),), ((middle, n),)]
    return [places]


def _first_tokens(group: Group, rank: int, of_keys: bool, others: tuple[int, ...], n: int) -> int:
    """Return how many first tokens of a rank have `FIRST_SHARE` of its visible pairs.

    `n` is the number of tokens of the rank.  The other parameters are as in `split_own`.
    """
    shards, theirs, mask = group.shards(of_keys), group.shards(not of_keys), group.problem.mask
    if type(mask) is Full:  # a closed form is far faster, also for causal masks
        across = sum(theirs.counts[x] for x in others)
        return bisect_left(range(n), FIRST_SHARE * (n * across), key=lambda i: (i + 1) * across)
    if type(mask) is Causal:
        return causal_share(shards.runs(rank), _runs_of(theirs, others), of_keys, FIRST_SHARE)
    own, across = shards.tokens(rank), _tokens_of(theirs, others)
    if of_keys:
        pairs = queries_per_key(mask.intervals(across, own), n)  # (keys,)
    else:
        pairs = keys_per_query(mask.intervals(own, across))  # (queries,)
    return int(np.searchsorted(np.cumsum(pairs), FIRST_SHARE * pairs.sum()))


@lru_cache(maxsize=256)
def _runs_of(shards: Distribution, owners: tuple[int, ...]) -> list[range]:
    """Return the tokens of several shards as progressions, shard by shard."""
    return [r for p in owners for r in shards.runs(p) if r]


@lru_cache(maxsize=256)
def _tokens_of(shards: Distribution, owners: tuple[int, ...]) -> np.ndarray:
    return np.sort(concatenated(_runs_of(shards, owners)))
