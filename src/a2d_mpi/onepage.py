"""Attention2D on one page: exact on any sizes, without overlap, buffers and options.

Ranks form a grid.  A rank computes one tile: the queries of its grid row against the keys of its
grid column.  Source: Elango, "Attention2D", arXiv:2503.15758.

Names of tensors that a whole line has are capital: Q has the rows of q of all its ranks.
`a2d_mpi.schedules.attention2d` does the same faster: comments with "Faster:" say how.  Tests and
checks of drivers compare plans with this page, which shares no code with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from a2d_mpi.core import reference
from a2d_mpi.masks.mask import Mask


def forward(
    row: Any, col: Any, queries: ndarray, keys: ndarray, q: ndarray, k: ndarray, v: ndarray,
    mask: Mask, **options: Any,
) -> tuple[ndarray, ndarray]:  # fmt: skip
    """Compute attention of this rank's queries to the keys of all ranks.

    Parameters
    ----------
    row, col : Intracomm
        The C ranks of this rank's grid row, and the R ranks of its column.
    queries, keys : (n,), (m,) int
        Positions in the sequence of this rank's rows of q, and of k and v.  Each position is in
        `queries` of one rank of the grid, and in `keys` of one.  n and m differ between ranks:
        below, C n and R m stand for their sums over the line.
    q : (n, H, D) float
    k, v : (m, Hkv, D) float
    mask : Mask
    **options
        `softmax_scale`, and what else `a2d_mpi.core.reference.attention` takes.

    Returns
    -------
    out : (n, H, D)
    lse : (n, H)
    """
    # Faster: only rows that another rank requires travel, in chunks; receives are posted early.
    Queries, Q = (gathered(row, x) for x in (queries, q))  # (C n,), (C n, H, D)
    Keys, K, V = (gathered(col, x) for x in (keys, k, v))  # (R m,), (R m, Hkv, D)
    # Faster: rows are computed as they arrive, in blocks.
    out, lse = reference.attention(Q, K, V, mask.dense(Queries, Keys), **options)  # (C n, H, D)
    # Faster: a partial result leaves as soon as it is done.
    outs, lses = (returned(row, len(queries), x) for x in (out, lse))  # C of (n, H, D), (n, H)
    lse = np.logaddexp.reduce(lses)  # (n, H)
    # A query that sees no key has out 0 and lse -inf, and -inf minus -inf would be NaN.
    finite = np.where(np.isneginf(lse), 0, lse)
    return sum(np.exp(y - finite)[..., None] * x for x, y in zip(outs, lses)), lse


def backward(
    row: Any, col: Any, queries: ndarray, keys: ndarray, dout: ndarray, q: ndarray, k: ndarray,
    v: ndarray, out: ndarray, lse: ndarray, mask: Mask, **options: Any,
) -> tuple[ndarray, ndarray, ndarray]:  # fmt: skip
    """Compute the gradients of this rank's rows of q, k and v from `forward`'s out and lse.

    Parameters are those of `forward`, and `dout`, the gradient of out.
    """
    delta = (dout * out).sum(axis=-1)  # (n, H)
    # out does not travel: lse and delta, with dout and q, are all that a tile needs of its rows.
    Queries, dOut, Q, Lse, Delta = (gathered(row, x) for x in (queries, dout, q, lse, delta))
    Keys, K, V = (gathered(col, x) for x in (keys, k, v))
    # Faster: the larger of dQ, and dK with dV, leaves for each owner as soon as it is complete.
    tile = mask.dense(Queries, Keys)  # (C n, R m)
    dQ, dK, dV = reference.attention_backward(dOut, Q, K, V, Lse, Delta, tile, **options)
    # Faster: both sides travel at the same time.
    dq = sum(returned(row, len(queries), dQ))  # (n, H, D)
    dk, dv = (sum(returned(col, len(keys), x)) for x in (dK, dV))  # (m, Hkv, D)
    return dq, dk, dv


def gathered(line: Any, x: ndarray) -> ndarray:
    """Return the rows of all ranks of a line, one rank after the other."""
    return np.concatenate(line.allgather(x))


def returned(line: Any, n: int, x: ndarray) -> list[ndarray]:
    """Send each rank of a line the rows of its tokens; return what each has for this rank's.

    x has the rows of all ranks, one rank after the other, of which n are this rank's.
    """
    ends = np.cumsum(line.allgather(n))[:-1]
    return line.alltoall(np.split(x, ends))
