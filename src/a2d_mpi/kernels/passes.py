"""Passes of the NumPy kernel over its arrays, by NumPy or compiled by Numba.

Without AVX-512 ``np.exp`` takes a fifth of a forward pass; beside small tiles every call counts.
"""

from __future__ import annotations

import numpy as np


class Passes:
    """All that is neither a product of matrices nor a copy; by NumPy, of any dtype.

    Parameters
    ----------
    dtype : dtype
        In which the kernel computes.
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
        """Replace logits by their exponentials, and add them up.

        Parameters
        ----------
        s : (heads, rows, keys)
            C-contiguous; -inf becomes 0, NaN stays NaN.
        total : (heads, rows) or None
            The sum of each row is added to it.
        differ : slice or None
            Rows of which some pairs are hidden.
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
        masked: np.ndarray | None,
        unseen: np.ndarray | None,
    ) -> tuple[float, float, float, float]:
        """Largest squares of the norms of vectors, (tokens, heads, d).

        Of q; of k; of v in the head where it is least, and in that where it is largest.  NaN may
        be left out.  `masked` queries and `unseen` keys, (tokens,) bool or None, do not count;
        there are others.
        """
        q2, k2, v2 = (np.einsum("thd,thd->th", x, x, dtype=self._dtype) for x in (q, k, v))
        for x, hide in ((q2, masked), (k2, unseen), (v2, unseen)):
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
        """Write out and lse of rows, from their sums.

        Parameters
        ----------
        acc, total : (heads_kv, tokens x group, d), (heads_kv, tokens x group)
            C-contiguous; they may change.  Where total is 0, out becomes 0 and lse -inf.
        shift : (heads_kv, tokens x group) or None
            Logits were smaller by it.
        out, lse : (tokens, heads, d), (tokens, heads)
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
