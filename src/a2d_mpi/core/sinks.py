"""Sinks: a logit per head that adds to the denominator of the softmax, and its gradient."""

from __future__ import annotations

import numpy as np


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
