"""Dense attention and its gradients, written down as the textbook has it.

Slow, O(nq nk) memory per head, and independent of the tile kernels: everything else is checked
against these functions in float64.  They also take a *part* of the keys (for the forward pass) or
a part of the queries (for dk and dv), so that samples of large distributed runs can be checked.
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
) -> tuple[np.ndarray, np.ndarray]:
    """``softmax(softmax_scale q k^T) v`` over the visible keys.

    Parameters
    ----------
    q : (nq, nheads, headdim) float
    k, v : (nk, nheads_kv, headdim) float
        Query head h reads key head ``h // (nheads // nheads_kv)``.
    visible : (nq, nk) bool
    softmax_scale : float
    dtype : float dtype
        All arithmetic is done in it; float64 is the reference, others tell the error that a plain
        single-device computation in that precision makes.
    products : float dtype, optional
        What probabilities (in the backward pass also their gradients) are rounded to before
        they are multiplied: tensor cores take 16-bit factors.  Default: no rounding.

    Returns
    -------
    out : (nq, nheads, headdim) dtype
    lse : (nq, nheads) dtype, nats
        0 and -inf for queries that see no key.
    """
    q, k, v = (np.asarray(x, dtype) for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    out = np.zeros(q.shape, dtype)
    lse = np.full(q.shape[:2], -np.inf, dtype)
    for h in range(q.shape[1]):
        p = _logits(q[:, h], k[:, h // group], visible, softmax_scale)
        shift = p.max(axis=1, initial=-np.inf)
        shift[np.isneginf(shift)] = 0
        p = np.exp(p - shift[:, None])
        total = p.sum(axis=1)
        seen = total > 0
        out[seen, h] = (_rounded(p[seen], products) @ v[:, h // group]) / total[seen, None]
        lse[seen, h] = shift[seen] + np.log(total[seen])
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of `attention` with respect to q, k and v.

    Parameters
    ----------
    dout, q : (nq, nheads, headdim) float
    k, v : (nk, nheads_kv, headdim) float
    lse, delta : (nq, nheads) float
        Over *all* keys that the query sees; delta is ``rowsum(dout * out)``.
    visible : (nq, nk) bool
    softmax_scale : float
    dtype, products : float dtypes
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
        s = _logits(q[:, h], k[:, g], visible, softmax_scale)
        # A query that sees no key has lse -inf and only hidden keys: any finite shift gives p = 0.
        shift = np.where(np.isneginf(lse[:, h]), 0, lse[:, h])
        p = np.exp(s - shift[:, None])
        ds = p * (dout[:, h] @ v[:, g].T - delta[:, h, None])
        p, ds = _rounded(p, products), _rounded(ds, products)
        dv[:, g] += p.T @ dout[:, h]
        dq[:, h] = softmax_scale * (ds @ k[:, g])
        dk[:, g] += softmax_scale * (ds.T @ q[:, h])
    return dq, dk, dv


def _rounded(x: np.ndarray, dtype: np.typing.DTypeLike | None) -> np.ndarray:
    return x if dtype is None else x.astype(dtype).astype(x.dtype)


def _logits(q: np.ndarray, k: np.ndarray, visible: np.ndarray, softmax_scale: float) -> np.ndarray:
    s = (q @ k.T) * q.dtype.type(softmax_scale)
    s[~visible] = -np.inf
    return s
