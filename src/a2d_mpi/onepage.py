"""Attention2D on one page: exact on any sizes, without overlap, buffers and options.

Ranks form a grid.  A rank computes one tile: the queries of its grid row against the keys of its
grid column.  Source: Elango, "Attention2D", arXiv:2503.15758.

`a2d_mpi.schedules.attention2d` does the same faster.  Comments name its functions, and what they
add.  Tests and checks of drivers compare plans with this page, which shares no code with them.
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
        The C ranks of this rank's grid row, and the R ranks of its column.  Among the ranks of
        all rows together, or of all columns, every token has one owner.
    queries, keys : (n,), (m,) int
        Tokens of this rank's rows of q, and of k and v.
    q : (n, H, D) float
    k, v : (m, Hkv, D) float
    mask : Mask
    **options
        Of `a2d_mpi.core.reference.attention`, such as `softmax_scale`.

    Returns
    -------
    out : (n, H, D)
    lse : (n, H)
    """
    # Line.of_row: only rows that another rank requires travel, in chunks, posted early.
    Queries, Q = (gathered(row, x) for x in (queries, q))  # (C n,), (C n, H, D)
    Keys, K, V = (gathered(col, x) for x in (keys, k, v))  # (R m,), (R m, Hkv, D)
    # p.attend in `forward`: rows are computed as they arrive, in blocks.
    out, lse = reference.attention(Q, K, V, mask.dense(Queries, Keys), **options)  # (C n, H, D)
    # row.give, row.finish: a partial result leaves as soon as it is done.
    outs, lses = (returned(row, queries, x) for x in (out, lse))  # C of (n, H, D), C of (n, H)
    lse = np.logaddexp.reduce(lses)  # (n, H)
    seen = np.where(np.isneginf(lse), 0, lse)  # a row that sees nothing has out 0 and lse -inf
    return sum(np.exp(y - seen)[..., None] * x for x, y in zip(outs, lses)), lse


def backward(
    row: Any, col: Any, queries: ndarray, keys: ndarray, dout: ndarray, q: ndarray, k: ndarray,
    v: ndarray, out: ndarray, lse: ndarray, mask: Mask, **options: Any,
) -> tuple[ndarray, ndarray, ndarray]:  # fmt: skip
    """Compute the gradients of this rank's rows of q, k and v from `forward`'s out and lse.

    Parameters are those of `forward`, and `dout`, the gradient of out.
    """
    delta = (dout * out).sum(axis=-1)  # (n, H)
    # Line.of_row: out does not travel; lse and delta travel with dout and q.
    Queries, dO, Q, L, D = (gathered(row, x) for x in (queries, dout, q, lse, delta))
    Keys, K, V = (gathered(col, x) for x in (keys, k, v))
    # p.differentiate in `backward`: the side with more bytes is finished owner by owner.
    tile = mask.dense(Queries, Keys)  # (C n, R m)
    dQ, dK, dV = reference.attention_backward(dO, Q, K, V, L, D, tile, **options)
    # send_held_back and finish: sums of both sides travel at the same time.
    dq, dk, dv = returned(row, queries, dQ), returned(col, keys, dK), returned(col, keys, dV)
    return sum(dq), sum(dk), sum(dv)


def gathered(line: Any, x: ndarray) -> ndarray:
    """Return the rows of all ranks of a line, one rank after the other."""
    return np.concatenate(line.allgather(x))


def returned(line: Any, own: ndarray, x: ndarray) -> list[ndarray]:
    """Send each rank of a line the rows of its tokens; return what all have for `own` tokens."""
    ends = np.cumsum(line.allgather(len(own)))[:-1]
    return line.alltoall(np.split(x, ends))
