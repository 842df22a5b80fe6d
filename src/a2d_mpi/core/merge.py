"""Merging of partial attention results over disjoint sets of keys.

A partial result of a query is (out, lse): the softmax-weighted mean of the values it saw, and the
log of the sum of the exponentials of its logits.  ``merge`` is associative and commutative up
to rounding, with the identity (0, -inf).  It applies the online softmax of Milakov and Gimelshein
(arXiv:1805.02867) to blocks.
"""

from __future__ import annotations

import numpy as np


def merge(
    out: np.ndarray, lse: np.ndarray, compensation: np.ndarray, out2: np.ndarray, lse2: np.ndarray
) -> None:
    """Merge (out2, lse2) into (out, lse), in place.

    Parameters
    ----------
    out, out2 : (tokens, nheads, headdim) float
        Partial results.  `out` receives the merged result; its dtype is at least as wide.
        **`out2` is used as scratch**: it holds no meaningful value afterwards.
    lse, lse2 : (tokens, nheads) float32 or wider
        Log-sum-exp of the partial results, in nats; -inf where a query saw no key.  `lse`
        receives the merged lse; `lse2` does not change.
    compensation : (tokens, nheads), dtype of `lse`
        Kahan compensation: the rounding error of `lse` in earlier merges, 0 before the first
        merge.

    Notes
    -----
    The exponentials are shifted by the larger lse, so they cannot overflow.  The merged out is a
    convex combination, so its error does not grow with the number of merges.  Without
    `compensation` the error of lse would grow by half a rounding in each merge.  Where both lse
    are -inf the result is (0, -inf).  NaN stays NaN.
    """
    if out2.dtype != out.dtype:
        out2 = out2.astype(out.dtype)
    exact = np.add(lse, compensation, dtype=np.float64)  # (tokens, nheads)
    shift = np.maximum(exact, lse2)  # (tokens, nheads)
    # -inf - -inf would be NaN: masked rows are shifted by 0 instead.
    shift[np.isneginf(shift)] = 0
    weight = np.exp(exact - shift)  # (tokens, nheads)
    weight2 = np.exp(lse2 - shift)  # (tokens, nheads)
    total = weight + weight2  # (tokens, nheads)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.log(total) + shift  # (tokens, nheads)
        lse[...] = exact
        compensation[...] = np.where(np.isfinite(exact), exact - lse, 0)
    total[total == 0] = 1
    out *= (weight / total).astype(out.dtype)[..., None]  # (tokens, nheads, headdim)
    out2 *= (weight2 / total).astype(out.dtype)[..., None]  # (tokens, nheads, headdim)
    out += out2
