"""Chunks in which shards travel, and the order of a rank's work on its own shard."""

from __future__ import annotations

GRAIN = 128  # tokens: a shard is cut at a multiple of it, if it has two of these at least
FIRST_SHARE = 0.6  # share of the work on a rank's own shard that comes before the other work


def chunks(tokens: int, ranks: int) -> list[slice]:
    """The chunks in which a shard travels along a row or column of `ranks` ranks.

    Among more than two ranks a shard is a small share of the traffic, and travels as one chunk.
    Between two ranks it is all of the traffic: the receiver of one chunk could compute nothing
    before its end, and the sender of one chunk would send nothing before all is computed.
    """
    middle = GRAIN * round(tokens / 2 / GRAIN)
    if ranks == 2 and tokens >= 2 * GRAIN:
        return [slice(0, middle), slice(middle, tokens)]
    return [slice(0, tokens)]


def splits_own_shard(tokens: int, ranks: int) -> bool:
    """Tell whether a rank of such a row or column keeps some work on its shard for the end."""
    return ranks > 1 and tokens >= 2 * GRAIN


def split_own_shard(first: int, tokens: int, ranks: int) -> list[slice]:
    """Tokens of its own shard that a rank does before the other shards, and those after them.

    Parameters
    ----------
    first : int
        Tokens that have about `FIRST_SHARE` of the visible pairs.
    tokens : int
        Of the shard.
    ranks : int
        Of the row or column.  One rank alone has no partial results that travel at the end.
    """
    middle = GRAIN * round(first / GRAIN)
    if splits_own_shard(tokens, ranks) and 0 < middle < tokens:
        return [slice(0, middle), slice(middle, tokens)]
    return [slice(0, tokens)]
