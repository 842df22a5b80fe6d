"""Copies of tensors by head, in buffers of a NumPy kernel, and products of cache blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.core.kernel_memory import BLOCK_K, BLOCK_Q, head_groups
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.kernels.blocks import Blocker, CacheBlock
from a2d_mpi.kernels.passes import Passes


class Packing:
    """Buffers and products of a NumPy kernel; see `a2d_mpi.kernels.numpy.NumpyKernel`."""

    def __init__(
        self,
        dtype: np.typing.DTypeLike,
        softmax_scale: float,
        poll: Callable[[], object] | None = None,
        block_q: int = BLOCK_Q,
        block_k: int = BLOCK_K,
        work: Workspace | None = None,
        logit_softcap: float | None = None,
        passes: Passes | None = None,
    ) -> None:
        self.dtype = compute_dtype(np.dtype(dtype))
        self.softmax_scale, self.logit_softcap = softmax_scale, logit_softcap
        self.poll = poll or (lambda: None)
        self._work, self._blocker = work or Workspace(), Blocker(block_q, block_k)
        self._passes = passes or Passes(self.dtype)
        # exp(+-half), and its products with values between low and high, neither overflow nor
        # underflow.
        info = np.finfo(self.dtype)
        self._half = math.log(info.max) / 2
        self._high = math.exp(self._half)
        self._low = float(info.tiny / info.eps) * self._high

    def _get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._work.get(("kernel", name), shape, self.dtype)

    def _shown(
        self, rows: int, keys: int, differ: slice | None, hidden: np.ndarray | None
    ) -> np.ndarray | None:
        """Return 1 for visible and 0 for hidden pairs; None if none is hidden."""
        if hidden is None:
            return None
        shown = np.ones((rows, keys), self.dtype)
        shown[differ] = ~hidden
        return shown

    def _product(
        self, weights: np.ndarray, x: np.ndarray, shown: np.ndarray | None, out: np.ndarray
    ) -> None:
        """Compute ``out = weights x``.

        With `shown`, only rows that see NaN or infinite elements of x become NaN.
        """
        bad = None if shown is None else ~np.isfinite(x)
        if bad is None or not bad.any():
            np.matmul(weights, x, out=out)
            return
        np.matmul(weights, np.where(bad, 0, x), out=out)
        np.copyto(out, np.nan, where=shown @ bad.astype(x.dtype) > 0)

    def _cap(self, s: np.ndarray, slope: np.ndarray | None = None) -> None:
        """Apply the soft-cap to logits, in place; write its derivative to `slope`."""
        cap = self.dtype.type(self.logit_softcap)
        s /= cap
        np.tanh(s, out=s)
        if slope is not None:
            np.multiply(s, s, out=slope)
            np.subtract(1, slope, out=slope)
        s *= cap

    def _find_largest(
        self, s: np.ndarray, shift: np.ndarray | None, block: CacheBlock, largest: np.ndarray
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

    def _groups(self, nheads_kv: int, rows: int, nk: int, d: int) -> list[tuple[int, int]]:
        """Return groups of KV heads that are packed at once, as (first, number).

        The heads of a token are adjacent in memory, so packing head by head takes twice as long.
        """
        count = head_groups(nheads_kv, rows, nk, d)
        bounds = [nheads_kv * i // count for i in range(count + 1)]
        return [(first, last - first) for first, last in zip(bounds, bounds[1:], strict=False)]

    def _by_heads(
        self, cache_blocks: Iterable[CacheBlock], heads: int, d: int
    ) -> Iterator[tuple[slice, CacheBlock]]:
        """Yield each cache block several times, with the heads that one call of NumPy computes.

        For a large cache block this is one head.  For a small one, it is as many heads as stay in
        the cache together with their buffers, to limit the overhead of NumPy's calls.
        """
        room = self._blocker.block_q * self._blocker.block_k
        for block in cache_blocks:
            m, b = block.rows.stop - block.rows.start, block.j1 - block.j0
            most = max(1, room // (m * b + 2 * (m + b) * (d + 1)))
            for first in range(0, heads, most):
                yield slice(first, min(first + most, heads)), block

    def _keys(
        self, name: str, x: np.ndarray, hide: np.ndarray | None, columns: int | None = None
    ) -> np.ndarray:
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
        self,
        name: str,
        x: np.ndarray,
        heads_kv: int,
        factor: float,
        column: np.ndarray | float | None,
        hide: np.ndarray | None,
    ) -> np.ndarray:
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
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        masked_rows: np.ndarray | None,
        masked_keys: np.ndarray | None,
    ) -> bool:
        """Return True if exp(logit) and its products with v surely stay in range without a shift.

        Masked rows of q and masked keys of k and v may hold anything, and do not count.
        """
        both = (q, masked_rows), (k, masked_keys)
        if not all(len(x) if hide is None else not hide.all() for x, hide in both):
            return True
        q2, k2, least, most = self._passes.largest_norms(q, k, v, masked_rows, masked_keys)
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
