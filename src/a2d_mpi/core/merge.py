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


def add_sink(out: np.ndarray, lse: np.ndarray, sink: np.ndarray) -> None:
    """Merge a sink into (out, lse), in place: a key with this logit and the value 0.

    Parameters
    ----------
    out : (tokens, nheads, headdim) float
        Attention over all keys; 0 in masked rows.
    lse : (tokens, nheads) float32 or wider
        Log-sum-exp over all keys, in nats; receives ``logaddexp(lse, sink)``.
    sink : (nheads,) float
        Logit of the sink of each head; -inf is no sink.
    """
    exact, shift = lse.astype(np.float64), np.maximum(lse, sink, dtype=np.float64)
    shift[np.isneginf(shift)] = 0
    weight = np.exp(exact - shift)  # (tokens, nheads)
    total = weight + np.exp(sink - shift)  # (tokens, nheads), 0 in masked rows without a sink
    with np.errstate(divide="ignore"):
        lse[...] = np.log(total) + shift
    total[total == 0] = 1
    out *= (weight / total).astype(out.dtype)[..., None]  # (tokens, nheads, headdim)


def sink_gradient(lse: np.ndarray, delta: np.ndarray, sink: np.ndarray) -> np.ndarray:
    """Compute the gradient of a sink from some tokens: ``-sum(exp(sink - lse) delta)``.

    Parameters
    ----------
    lse, delta : (tokens, nheads) float32 or wider
        Log-sum-exp in nats, with the sink, and ``rowsum(dout * out)``.
    sink : (nheads,) float

    Returns
    -------
    (nheads,) dtype of `sink`
    """
    exact = np.where(np.isneginf(lse), np.inf, lse).astype(np.float64)  # (tokens, nheads)
    p = np.exp(sink - exact)  # (tokens, nheads)
    return -np.einsum("th,th->h", p, delta).astype(sink.dtype)
