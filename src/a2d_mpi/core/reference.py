"""Dense attention and its gradients, as in a textbook.

These functions are slow, take O(nq nk) memory per head, and share no code with the kernels.  All
results are checked against them in float64.  They also work on a sample of the queries (out, lse
and dq) or of the keys (dk and dv), so samples of large distributed runs can be checked.
"""

from __future__ import annotations

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    softmax_scale: float,
    dtype: np.typing.DTypeLike = np.float64,
    products: np.typing.DTypeLike | None = None,
    *,
    logit_softcap: float | None = None,
    sink: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute ``softmax(softmax_scale q k^T) v`` over the visible keys.

    Parameters
    ----------
    q : (nq, nheads, headdim) float
    k, v : (nk, nheads_kv, headdim) float
        Query head h reads KV head ``h // (nheads // nheads_kv)``.  v and out may have another
        headdim than q and k.
    visible : (nq, nk) bool
        True where the query sees the key.
    softmax_scale : float
    dtype : float dtype
        Dtype of all arithmetic.  float64 is the reference; a narrower dtype shows the error of a
        plain single-device computation in that precision.
    products : float dtype, optional
        Dtype to which probabilities (in the backward pass also their gradients) are rounded before
        they are multiplied: tensor cores take 16-bit factors.  Default: no rounding.
    logit_softcap : float, optional
        c > 0: scaled logits s become ``c tanh(s / c)``.  Default: no cap.
    sink : (nheads,) float, optional
        Logit per head of a key whose value is 0.  It adds to the denominator and to lse.

    Returns
    -------
    out : (nq, nheads, headdim) dtype
    lse : (nq, nheads) dtype, nats
        out is 0 in masked rows; lse is -inf there, or the sink.
    """
    q, k, v = (np.asarray(x, dtype) for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    out = np.zeros((*q.shape[:2], v.shape[2]), dtype)
    lse = np.full(q.shape[:2], -np.inf, dtype)
    sinks = np.full(q.shape[1], -np.inf, dtype) if sink is None else np.asarray(sink, dtype)
    for h in range(q.shape[1]):
        g = h // group
        s, _ = _logits(q[:, h], k[:, g], visible, softmax_scale, logit_softcap)  # (nq, nk)
        shift = s.max(axis=1, initial=sinks[h])  # (nq,)
        shift[np.isneginf(shift)] = 0
        p = np.exp(s - shift[:, None])  # (nq, nk)
        total = p.sum(axis=1) + np.exp(sinks[h] - shift)  # (nq,)
        seen = total > 0  # (nq,), False in masked rows without a sink
        out[seen, h] = (_rounded(p[seen], products) @ v[:, g]) / total[seen, None]  # (nq, headdim)
        lse[seen, h] = shift[seen] + np.log(total[seen])  # (nq,)
    return out, lse


def attention_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lse: np.ndarray,
    delta: np.ndarray,
    visible: np.ndarray,
    softmax_scale: float,
    dtype: np.typing.DTypeLike = np.float64,
    products: np.typing.DTypeLike | None = None,
    *,
    logit_softcap: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradients of `attention` with respect to q, k and v.

    Parameters
    ----------
    dout, q : (nq, nheads, headdim) float
    k, v : (nk, nheads_kv, headdim) float
    lse, delta : (nq, nheads) float
        lse over *all* keys that the query sees, and the sink; delta is ``rowsum(dout * out)``.
    visible : (nq, nk) bool
    softmax_scale : float
    dtype, products : float dtypes
        As in `attention`.
    logit_softcap : float, optional
        As in `attention`.

    Returns
    -------
    dq : (nq, nheads, headdim) dtype
        The contribution of the given keys.
    dk, dv : (nk, nheads_kv, headdim) dtype
        The contribution of the given queries.
    """
    dout, q, k, v, lse, delta = (np.asarray(x, dtype) for x in (dout, q, k, v, lse, delta))
    group = q.shape[1] // max(k.shape[1], 1)
    dq, dk, dv = np.zeros(q.shape, dtype), np.zeros(k.shape, dtype), np.zeros(v.shape, dtype)
    for h in range(q.shape[1]):
        g = h // group
        s, slope = _logits(q[:, h], k[:, g], visible, softmax_scale, logit_softcap)  # (nq, nk)
        # A masked row has lse -inf and only hidden keys: any finite shift gives p = 0.
        shift = np.where(np.isneginf(lse[:, h]), 0, lse[:, h])  # (nq,)
        p = np.exp(s - shift[:, None])  # (nq, nk)
        ds = p * (dout[:, h] @ v[:, g].T - delta[:, h, None]) * slope  # (nq, nk)
        p, ds = _rounded(p, products), _rounded(ds, products)
        dv[:, g] += p.T @ dout[:, h]  # (nk, headdim)
        dq[:, h] = softmax_scale * (ds @ k[:, g])  # (nq, headdim)
        dk[:, g] += softmax_scale * (ds.T @ q[:, h])  # (nk, headdim)
    return dq, dk, dv


def sink_gradient(
    lse: np.ndarray,
    delta: np.ndarray,
    sink: np.ndarray,
    dtype: np.typing.DTypeLike = np.float64,
) -> np.ndarray:
    """Compute the gradient of `attention` with respect to the sink, from some of the queries.

    Parameters
    ----------
    lse, delta : (nq, nheads) float
        As in `attention_backward`; lse includes the sink.
    sink : (nheads,) float
    dtype : float dtype
        As in `attention`.

    Returns
    -------
    (nheads,) dtype
    """
    lse, delta, sink = (np.asarray(x, dtype) for x in (lse, delta, sink))
    # Without a key and with a sink of -inf, lse is -inf too.
    p = np.exp(sink - np.where(np.isneginf(lse), 0, lse))  # (nq, nheads)
    # The value of the sink is 0, so its dp is 0, and its ds is p (0 - delta).
    return -(p * delta).sum(axis=0)


def _rounded(x: np.ndarray, dtype: np.typing.DTypeLike | None) -> np.ndarray:
    return x if dtype is None else x.astype(dtype).astype(x.dtype)


def _logits(
    q: np.ndarray,
    k: np.ndarray,
    visible: np.ndarray,
    softmax_scale: float,
    logit_softcap: float | None,
) -> tuple[np.ndarray, np.ndarray | float]:
    """Return the logits, -inf where hidden, and their derivatives by the scaled q k^T."""
    s, slope = (q @ k.T) * q.dtype.type(softmax_scale), 1.0  # (nq, nk)
    if logit_softcap is not None:
        cap = q.dtype.type(logit_softcap)
        tanh = np.tanh(s / cap)  # (nq, nk)
        s, slope = cap * tanh, 1 - tanh**2
    s[~visible] = -np.inf
    return s, slope
