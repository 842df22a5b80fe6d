"""Dense attention and its gradients, as in a textbook.

These functions are slow, take O(nq nk) memory per head, and share no code with the kernels: all
results are checked against them in float64.  They also take some of the keys (for the forward
pass) or some of the queries (for dk and dv): samples of large distributed runs can be checked.
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
    """Compute ``softmax(softmax_scale q k^T) v`` over the visible keys.

    Parameters
    ----------
    q : (nq, nheads, headdim) float
    k, v : (nk, nheads_kv, headdim) float
        Query head h reads KV head ``h // (nheads // nheads_kv)``.
    visible : (nq, nk) bool
    softmax_scale : float
    dtype : float dtype
        Dtype of all arithmetic.  float64 is the reference; a narrower one shows the error of a
        plain single-device computation in that precision.
    products : float dtype, optional
        Dtype to which probabilities (in the backward pass also their gradients) are rounded before
        they are multiplied: tensor cores take 16-bit factors.  Default: no rounding.

    Returns
    -------
    out : (nq, nheads, headdim) dtype
    lse : (nq, nheads) dtype, nats
        out is 0 and lse is -inf in masked rows.
    """
    q, k, v = (np.asarray(x, dtype) for x in (q, k, v))
    group = q.shape[1] // max(k.shape[1], 1)
    out = np.zeros(q.shape, dtype)
    lse = np.full(q.shape[:2], -np.inf, dtype)
    for h in range(q.shape[1]):
        g = h // group
        s = _logits(q[:, h], k[:, g], visible, softmax_scale)  # (nq, nk)
        shift = s.max(axis=1, initial=-np.inf)  # (nq,)
        shift[np.isneginf(shift)] = 0
        p = np.exp(s - shift[:, None])  # (nq, nk)
        total = p.sum(axis=1)  # (nq,)
        seen = total > 0  # (nq,), False in masked rows
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
        s = _logits(q[:, h], k[:, g], visible, softmax_scale)  # (nq, nk)
        # A masked row has lse -inf and only hidden keys: any finite shift gives p = 0.
        shift = np.where(np.isneginf(lse[:, h]), 0, lse[:, h])  # (nq,)
        p = np.exp(s - shift[:, None])  # (nq, nk)
        ds = p * (dout[:, h] @ v[:, g].T - delta[:, h, None])  # (nq, nk)
        p, ds = _rounded(p, products), _rounded(ds, products)
        dv[:, g] += p.T @ dout[:, h]  # (nk, headdim)
        dq[:, h] = softmax_scale * (ds @ k[:, g])  # (nq, headdim)
        dk[:, g] += softmax_scale * (ds.T @ q[:, h])  # (nk, headdim)
    return dq, dk, dv


def _rounded(x: np.ndarray, dtype: np.typing.DTypeLike | None) -> np.ndarray:
    return x if dtype is None else x.astype(dtype).astype(x.dtype)


def _logits(q: np.ndarray, k: np.ndarray, visible: np.ndarray, softmax_scale: float) -> np.ndarray:
    s = (q @ k.T) * q.dtype.type(softmax_scale)  # (nq, nk)
    s[~visible] = -np.inf
    return s
