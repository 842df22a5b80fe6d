"""Parts of the NumPy kernel: copies of tensors by head, products, and passes over its arrays.

Without AVX-512, ``np.exp`` takes a fifth of a forward pass.  In small blocks, the number of NumPy
calls decides.  So the kernel "numba" compiles the passes: `exponentials`, `largest_norms` and
`finish`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.core.kernel_memory import BLOCK_K, BLOCK_Q, head_groups
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.kernels.blocks import Blocker, CacheBlock

Slices = tuple[slice, slice]


class Packing:
    """Buffers, products and passes of a NumPy kernel; see `a2d_mpi.kernels.numpy.NumpyKernel`."""

    def __init__(
        self,
        dtype: np.typing.DTypeLike,
        softmax_scale: float,
        poll: Callable[[], object] | None = None,
        block_q: int = BLOCK_Q,
        block_k: int = BLOCK_K,
        work: Workspace | None = None,
        logit_softcap: float | None = None,
        **_: Any,
    ) -> None:
        self.dtype = compute_dtype(np.dtype(dtype))
        self.softmax_scale, self.logit_softcap = softmax_scale, logit_softcap
        self.poll = poll or (lambda: None)
        self._work, self._blocker = work or Workspace(), Blocker(block_q, block_k)
        # exp(+-half), and its products with values between low and high, neither overflow nor
        # underflow.
        info = np.finfo(self.dtype)
        self._half = math.log(info.max) / 2
        self._high = math.exp(self._half)
        self._low = float(info.tiny / info.eps) * self._high

    def _get(self, name: str, shape: tuple[int, ...], dtype: np.dtype | None = None) -> Array:
        return self._work.get(("kernel", name), shape, self.dtype if dtype is None else dtype)

    def _shown(self, block: CacheBlock) -> Array | None:
        """Return 1 for visible and 0 for hidden pairs, (rows, keys); None if none is hidden."""
        if block.hidden is None:
            return None
        shown = np.ones((block.rows.stop - block.rows.start, block.j1 - block.j0), self.dtype)
        shown[block.differ] = ~block.hidden
        return shown

    def _product(self, weights: Array, x: Array, shown: Array | None, out: Array) -> None:
        """Compute ``out = weights x``.

        With `shown`, only rows that see NaN or infinite elements of x become NaN.
        """
        bad = None if shown is None else ~np.isfinite(x)
        if bad is None or not bad.any():
            np.matmul(weights, x, out=out)
            return
        np.matmul(weights, np.where(bad, 0, x), out=out)
        np.copyto(out, np.nan, where=shown @ bad.astype(x.dtype) > 0)

    def _cap(self, s: Array, slope: Array | None = None) -> None:
        """Apply the soft-cap to logits, in place; write its derivative to `slope`."""
        cap = self.dtype.type(self.logit_softcap)
        s /= cap
        np.tanh(s, out=s)
        if slope is not None:
            np.multiply(s, s, out=slope)
            np.subtract(1, slope, out=slope)
        s *= cap

    def _find_largest(
        self, s: Array, shift: Array | None, block: CacheBlock, largest: Array
    ) -> None:
        """Raise `largest`, one number for each head, to the visible logits of a cache block.

        `s` is (KV heads, rows, keys): logits minus the shift of each row.  Hidden logits become
        -inf.
        """
        if block.hidden is not None:
            np.copyto(s[:, block.differ], -np.inf, where=block.hidden)
        by_row = s.max(axis=-1) if shift is None else s.max(axis=-1) + shift  # (KV heads, rows)
        by_head = by_row.reshape(len(s), -1, len(largest) // len(s)).max(axis=1).ravel()
        np.maximum(largest, by_head, out=largest)

    def _groups(self, nheads_kv: int, rows: int, nk: int, d: int) -> list[range]:
        """Return the KV heads that are packed at once.

        The heads of a token are adjacent in memory, so packing head by head takes twice as long.
        """
        count = head_groups(nheads_kv, rows, nk, d)
        bounds = [nheads_kv * i // count for i in range(count + 1)]
        return [range(*x) for x in pairwise(bounds)]

    def _by_heads(
        self, cache_blocks: Iterable[CacheBlock], heads: int, d: int
    ) -> Iterator[tuple[CacheBlock, Slices, Slices, tuple[int, int, int]]]:
        """Yield each cache block several times, with the heads that one call of NumPy computes.

        For a large cache block this is one head.  For a small one, it is as many heads as stay in
        the cache together with their buffers, to limit the overhead of NumPy's calls.  With a
        block come its heads and rows, its heads and keys, and the numbers of heads, rows and keys.
        """
        room = self._blocker.block_q * self._blocker.block_k
        for block in cache_blocks:
            m, b = block.rows.stop - block.rows.start, block.j1 - block.j0
            most = max(1, room // (m * b + 2 * (m + b) * (d + 1)))
            for first in range(0, heads, most):
                some = slice(first, min(first + most, heads))
                keys, sizes = slice(block.j0, block.j1), (some.stop - first, m, b)
                yield block, (some, block.rows), (some, keys), sizes

    def _keys(self, name: str, x: Array, hide: Array | None, columns: int | None = None) -> Array:
        """Copy (keys, heads, d) to (heads, keys, columns); columns after d are ones.

        Rows of keys with true `hide` become 0.  By default there are d + 1 columns.  If the copy
        would change nothing, return a view: BLAS reads strided rows as fast as packed rows.
        """
        keys, heads, d = x.shape
        if columns == d and x.dtype == self.dtype and hide is None:
            return x.swapaxes(0, 1)
        packed = self._get(name, (heads, keys, columns or d + 1))
        packed[..., :d] = x.swapaxes(0, 1)
        packed[..., d:] = 1
        if hide is not None:
            packed[:, hide, :d] = 0
        return packed

    def _pack(
        self, name: str, x: Array, heads_kv: int, factor: float, column: Any, hide: Array | None
    ) -> Array:
        """Copy (tokens, heads, d) times `factor` to (heads_kv, tokens x group, d + 1).

        `column` is the last column, (tokens, heads) or a number; None: there are d columns.  Rows
        of tokens with true `hide` become 0.
        """
        tokens, heads, d = x.shape
        columns, group = d + (column is not None), heads // heads_kv
        # Copy token by token, in the order of memory: head by head takes twice as long.
        if group == 1:
            to = self._get(name, (tokens, heads, columns))
            packed = to.swapaxes(0, 1)
        else:
            packed = self._get(name, (heads_kv, tokens, group, columns))
            to, x = packed.swapaxes(0, 1), x.reshape(tokens, heads_kv, group, d)
        np.multiply(x, self.dtype.type(factor), out=to[..., :d])
        if column is not None:
            to[..., d] = column if np.ndim(column) == 0 else column.reshape(x.shape[:-1])
        if hide is not None:
            to[hide] = 0
        return packed.reshape(heads_kv, tokens * group, columns)

    def _bounded(
        self, q: Array, k: Array, v: Array, masked_rows: Array | None, masked_keys: Array | None
    ) -> bool:
        """Return True if exp(logit) and its products with v surely stay in range without a shift.

        Masked rows of q and masked keys of k and v may hold anything, and do not count.
        """
        both = (q, masked_rows), (k, masked_keys)
        if not all(len(x) if hide is None else not hide.all() for x, hide in both):
            return True
        q2, k2, least, most = self.largest_norms(q, k, v, masked_rows, masked_keys)
        largest = math.sqrt(q2) * math.sqrt(k2) * abs(self.softmax_scale)
        if self.logit_softcap is not None and not math.isnan(largest):
            largest = min(largest, self.logit_softcap)
        # NaN fails these comparisons, so the general path is taken.
        if not (largest <= self._half and math.sqrt(most) * len(v) < self._high):
            return False
        # The largest element of a vector of v is at least its norm over the root of headdim_v.
        if masked_keys is not None and most == 0:
            v = v[~masked_keys]
        return least > self._low**2 * v.shape[2] or (most == 0 and not v.any())

    def exponentials(
        self, s: Array, total: Array | None, differ: slice | None, hidden: Array | None
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
        self, q: Array, k: Array, v: Array, masked_rows: Array | None, masked_keys: Array | None
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
        q2, k2, v2 = (np.einsum("thd,thd->th", x, x, dtype=self.dtype) for x in (q, k, v))
        for x, hide in ((q2, masked_rows), (k2, masked_keys), (v2, masked_keys)):
            if hide is not None:
                x[hide] = 0
        by_head = v2.max(axis=0)
        return float(q2.max()), float(k2.max()), float(by_head.min()), float(by_head.max())

    def finish(
        self, acc: Array, total: Array, shift: Array | None, out: Array, lse: Array
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
