"""A check of a user's mask, for tests."""

from __future__ import annotations

import numpy as np

from a2d_mpi.core.config import DISTRIBUTIONS
from a2d_mpi.masks.arrays import IntervalMask
from a2d_mpi.masks.compiled import check_repeats, compile_mask, visible_keys
from a2d_mpi.masks.mask import Mask


def check_mask(mask: Mask, seqlen: int, seqlen_kv: int | None = None) -> None:
    """Check the visible keys of every query of a user's mask on a short sequence, for tests.

    A plan checks the queries at which intervals turn, and that a few of them see the same keys in
    every call.  This function checks all queries, one after the other.

    Parameters
    ----------
    mask : Mask
    seqlen, seqlen_kv : int
        Queries and keys.  Default: as many keys as queries.

    Raises
    ------
    ValueError
        If the mask does not fit the sequence, or `visible`, `corners` or `default_distribution`
        is wrong.
    """
    n, nk = seqlen, seqlen if seqlen_kv is None else seqlen_kv
    seen, tokens, name = compile_mask(mask, n, nk), np.arange(n), type(mask).__name__
    check_repeats(seen.mask, tokens, nk)
    begin, end = zip(*visible_keys(seen.mask, tokens, nk))
    if compile_mask(IntervalMask(begin, end), n, nk).digest != seen.digest:
        raise ValueError(f"{name}.corners leaves out a query at which an interval turns")
    if mask.default_distribution not in DISTRIBUTIONS:
        raise ValueError(
            f"{name}.default_distribution must be one of {', '.join(DISTRIBUTIONS)}, "
            f"got {mask.default_distribution!r}"
        )
