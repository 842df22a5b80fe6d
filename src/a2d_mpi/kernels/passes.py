"""Passes of the NumPy kernel over its arrays, by NumPy or compiled by Numba.

Without AVX-512, ``np.exp`` takes a fifth of a forward pass.  In small blocks, the number of NumPy
calls decides.
"""

from __future__ import annotations

import numpy as np


class Passes:
    """Passes by NumPy, for any dtype: everything except matrix products and copies.

    Parameters
    ----------
    dtype : dtype
        Accumulation dtype of the kernel.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype

    def exponentials(
        self,
        s: np.ndarray,
        total: np.ndarray | None,
        differ: slice | None,
        hidden: np.ndarray | None,
    ) -> None:
        """Replace logits by their exponentials, and add these up.

        Parameters
        ----------
        s : (heads, rows, keys)
            Logits, C-contiguous.  -inf becomes 0; NaN stays NaN.
        total : (heads, rows) or None
            Sums, to which the sum of each row is added.
        differ : slice or None
            Rows with hidden pairs.
        hidden : (rows of differ, keys) bool or None
            Pairs whose logits count as -inf.
        """
        if hidden is not None:
            np.copyto(s[:, differ], -np.inf, where=hidden)
        np.exp(s, out=s)
        if total is not None:
            total += np.matmul(s, np.ones(s.shape[-1], s.dtype))  # four times as fast as a sum

    def largest_norms(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        masked_rows: np.ndarray | None,
        masked_keys: np.ndarray | None,
    ) -> tuple[float, float, float, float]:
        """Return the largest squared norms of the vectors of q, k and v.

        Parameters
        ----------
        q, k, v : (tokens, heads, headdim or headdim_v)
        masked_rows, masked_keys : (tokens,) bool or None
            Masked queries, and masked keys, which do not count.  At least one query and one key
            must count.

        Returns
        -------
        q2, k2 : float
            Largest squared norm of q, and of k.
        least, most : float
            Each head of v has a largest squared norm: the least and the largest of these.  NaN
            may be ignored.
        """
        q2, k2, v2 = (np.einsum("thd,thd->th", x, x, dtype=self._dtype) for x in (q, k, v))
        for x, hide in ((q2, masked_rows), (k2, masked_keys), (v2, masked_keys)):
            if hide is not None:
                x[hide] = 0
        by_head = v2.max(axis=0)
        return float(q2.max()), float(k2.max()), float(by_head.min()), float(by_head.max())

    def finish(
        self,
        acc: np.ndarray,
        total: np.ndarray,
        shift: np.ndarray | None,
        out: np.ndarray,
        lse: np.ndarray,
    ) -> None:
        """Compute out and lse from the sums of rows.

        Parameters
        ----------
        acc, total : (heads_kv, tokens x group, d), (heads_kv, tokens x group)
            Weighted sums of values, and sums of weights, C-contiguous; they may be overwritten.
            Where total is 0, out becomes 0 and lse -inf.
        shift : (heads_kv, tokens x group) or None
            The number that was subtracted from the logits of each row.
        out, lse : (tokens, heads, d), (tokens, heads)
            Receive the results.
        """
        tokens, nheads = lse.shape
        by_head = len(acc), tokens, nheads // len(acc)
        if not total.all():
            empty = total == 0
            total[empty] = 1
            shift = np.where(empty, -np.inf, 0 if shift is None else shift)
        lse, out = (
            x.reshape(tokens, *by_head[::2], *x.shape[2:]).swapaxes(0, 1) for x in (lse, out)
        )
        np.log(total.reshape(by_head), out=lse, casting="unsafe")
        if shift is not None:
            lse += shift.reshape(by_head)
        weight = total.reshape(*by_head, 1)
        np.divide(acc.reshape(out.shape), weight, out=out, casting="unsafe")
