"""The chunks in which shards travel, and the order of a rank's work on its own shard."""

from __future__ import annotations

from a2d_mpi.masks.intervals import Runs, cut, size
from a2d_mpi.schedules.group import Group
from a2d_mpi.sharding.pairs import first_tokens

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
        sides = group.shards(of_keys), group.shards(not of_keys)
        first = first_tokens(group.problem.mask, *sides, rank, others, of_keys, FIRST_SHARE)
        middle = GRAIN * round(first / GRAIN)
        if 0 < middle < n:
            return [((0, middle),), ((middle, n),)]
    return [places]
