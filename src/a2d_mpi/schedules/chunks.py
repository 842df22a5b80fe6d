"""The chunks in which shards travel, and the order of a rank's work on its own shard."""

from __future__ import annotations

GRAIN = 128  # tokens: a shard of at least 2 GRAIN tokens is cut at a multiple of GRAIN
FIRST_SHARE = 0.6  # share of the work on a rank's own shard that comes before all other work


def chunks(tokens: int, ranks: int) -> list[slice]:
    """Return the chunks in which a shard travels along a row or column of `ranks` ranks.

    Among more than two ranks a shard is a small share of the traffic, and travels as one chunk.
    Between two ranks it is all of the traffic, and travels as two chunks.  With one chunk the
    receiver could compute nothing before the whole message arrives.  The sender of a result could
    send nothing before the whole result is computed.
    """
    middle = GRAIN * round(tokens / 2 / GRAIN)
    if ranks == 2 and tokens >= 2 * GRAIN:
        return [slice(0, middle), slice(middle, tokens)]
    return [slice(0, tokens)]


def splits_own_shard(tokens: int, ranks: int) -> bool:
    """Return True if a rank keeps some work on its own shard for the end."""
    return ranks > 1 and tokens >= 2 * GRAIN


def split_own_shard(first: int, tokens: int, ranks: int) -> list[slice]:
    """Cut a rank's own shard into the tokens before the other shards and the tokens after them.

    Parameters
    ----------
    first : int
        Number of first tokens that have about `FIRST_SHARE` of the visible pairs.
    tokens : int
        Number of tokens of the shard.
    ranks : int
        Number of ranks of the row or column.  With one rank no partial results travel at the end,
        and the shard is not cut.
    """
    middle = GRAIN * round(first / GRAIN)
    if splits_own_shard(tokens, ranks) and 0 < middle < tokens:
        return [slice(0, middle), slice(middle, tokens)]
    return [slice(0, tokens)]
