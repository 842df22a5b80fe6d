"""The number of slices of a rank's heads; `a2d_mpi.schedules.pipeline` runs them."""

from __future__ import annotations

import numpy as np

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.layout import Layout

# Bytes of keys and values in a slice of a shard.  Measured on 16 emulated nodes: smaller slices
# gained nothing in the forward pass.
SMALLEST = 1 << 17
ALIVE = 3  # slices whose messages travel, or whose buffers hold anything, at the same time
TAKE, ATTEND, PUT = range(3)  # programs of a slice


def slices_of(
    asked: int | tuple[int, int] | None, config: AttentionConfig, layout: Layout, one: bool = False
) -> tuple[int, int]:
    """Return the slices of the heads in the forward and in the backward pass.

    Parameters
    ----------
    asked : int, (int, int) or None
        The user's choice.
    config : AttentionConfig
        With all heads.
    layout : Layout
    one : bool
        Take one slice by default.

    Raises
    ------
    ValueError
        If a slice would not have whole KV heads of a rank.
    """
    own = config.cp_group(layout.heads)
    if asked is None:
        return layout.slices or ((1, 1) if one else default(own, layout))
    both = asked if isinstance(asked, tuple) else (asked, asked)
    if len(both) != 2 or not all(isinstance(x, int | np.integer) and x >= 1 for x in both):
        raise ValueError(f"slices must be a positive number, or two, got {asked!r}")
    for number in both:
        if own.nheads_kv % number:
            raise ValueError(
                f"cannot cut the {own.nheads_kv} KV heads of a rank into {number} slices of whole "
                "KV heads"
            )
    return int(both[0]), int(both[1])


def default(own: AttentionConfig, layout: Layout) -> tuple[int, int]:
    """Return the slices of a plan that is not told, from the config with the heads of a rank.

    Transfers inside a node are fast, and small messages are not worth their overhead.  Otherwise a
    shard has at least `SMALLEST` bytes of keys and values for each slice.
    """
    if layout.size == 1 or (layout.nodes is not None and len(set(layout.nodes)) == 1):
        return 1, 1
    nbytes = own.seqlen_kv // layout.size * (own.nbytes("k") + own.nbytes("v"))
    numbers = (x for x in (4, 2) if own.nheads_kv % x == 0 and nbytes >= x * SMALLEST)
    return (next(numbers, 1),) * 2
