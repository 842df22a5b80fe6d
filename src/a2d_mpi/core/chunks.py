"""How a rank of a grid cuts its work, and what it does first."""

from __future__ import annotations

import numpy as np

GRAIN = 128  # tokens: what is cut in two has two of these at least, and is cut at a multiple
FIRST_SHARE = 0.6  # share of a rank's work on its own chunk that it does before that of the others


def chunks(tokens: int, ranks: int) -> list[slice]:
    """The units in which a chunk travels along a row or column of `ranks` ranks.

    With more than two ranks chunks are small parts of all that travels, and go whole.  Between two
    a rank would otherwise wait for all before it can begin, and send all when it has finished.
    """
    middle = GRAIN * round(tokens / 2 / GRAIN)
    if ranks == 2 and tokens >= 2 * GRAIN:
        return [slice(0, middle), slice(middle, tokens)]
    return [slice(0, tokens)]


def splits_own_shard(tokens: int, ranks: int) -> bool:
    """Whether a rank of such a row or column keeps some work on its own chunk for the end."""
    return ranks > 1 and tokens >= 2 * GRAIN


def split_own_shard(areas: np.ndarray, ranks: int) -> list[slice]:
    """What a rank does of its own chunk before that of the others, and what after that.

    Parameters
    ----------
    areas : (n,) int64
        Visible pairs of each token: the first part has about `FIRST_SHARE` of them.
    ranks : int
        Of the row or column.  Alone, a rank has no partial results that travel at the end.
    """
    n = len(areas)
    middle = GRAIN * round(
        int(np.searchsorted(np.cumsum(areas), FIRST_SHARE * areas.sum())) / GRAIN
    )
    if splits_own_shard(n, ranks) and 0 < middle < n:
        return [slice(0, middle), slice(middle, n)]
    return [slice(0, n)]


def gradients_by_query(rows: int, cols: int, nheads: int, nheads_kv: int) -> bool:
    """Whether a grid finishes its partial dq one after the other, and dk, dv at the end.

    One of the two reductions of the backward pass is finished piece by piece and travels while
    later pieces are computed; the other is left for the end: the smaller one.
    """
    return (cols - 1) * nheads >= 2 * (rows - 1) * nheads_kv
