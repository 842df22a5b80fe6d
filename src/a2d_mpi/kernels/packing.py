"""Copies of tensors by head, in buffers of a NumPy kernel, and products of cache blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.kernels.blocks import Blocker, CacheBlock

PACKED = 9 << 19  # elements of a tensor that are packed at once, if they are of several heads


class Packing:
    """Buffers and products of a kernel.

    Parameters
    ----------
    dtype : dtype
        Of the tensors; float16 and bfloat16 are computed in float32.
    softmax_scale : float
    blocker : Blocker
    work : Workspace
        Holds the buffers.
    logit_softcap : float or None

    Attributes
    ----------
    careful : bool
        Whether products keep NaN and infinite elements away from results that do not depend on
        them.
    """

    def __init__(
        self,
        dtype: np.typing.DTypeLike,
        softmax_scale: float,
        blocker: Blocker,
        work: Workspace,
        logit_softcap: float | None,
    ) -> None:
        self.dtype = compute_dtype(np.dtype(dtype))
        self.softmax_scale, self.logit_softcap, self.careful = softmax_scale, logit_softcap, False
        self._work, self._blocker = work, blocker
        # exp(+-half) and its products with values between low and high stay in range.
        info = np.finfo(self.dtype)
        self._half = math.log(info.max) / 2
        self._high = math.exp(self._half)
        self._low = float(info.tiny / info.eps) * self._high

    def _get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._work.get(("kernel", name), shape, self.dtype)

    def _shown(
        self, rows: int, keys: int, differ: slice | None, hidden: np.ndarray | None
    ) -> np.ndarray | None:
        """Visible pairs of a cache block, 1 or 0; None where nothing is hidden, or not careful."""
        if not self.careful or hidden is None:
            return None
        shown = np.ones((rows, keys), self.dtype)
        shown[differ] = ~hidden
        return shown

    def _product(
        self, weights: np.ndarray, x: np.ndarray, shown: np.ndarray | None, out: np.ndarray
    ) -> None:
        """Compute ``out = weights x``; if careful, with NaN in rows that see bad elements of x."""
        bad = None if shown is None else ~np.isfinite(x)
        if bad is None or not bad.any():
            np.matmul(weights, x, out=out)
            return
        np.matmul(weights, np.where(bad, 0, x), out=out)
        np.copyto(out, np.nan, where=shown @ bad.astype(x.dtype) > 0)

    def _cap(self, s: np.ndarray, slope: np.ndarray | None = None) -> None:
        """Apply the soft-cap to logits; its derivative goes to `slope`."""
        cap = self.dtype.type(self.logit_softcap)
        s /= cap
        np.tanh(s, out=s)
        if slope is not None:
            np.multiply(s, s, out=slope)
            np.subtract(1, slope, out=slope)
        s *= cap

    def _groups(self, nheads_kv: int, rows: int, nk: int, d: int) -> Iterator[tuple[int, int]]:
        """KV heads whose keys and queries are packed at once, as (first, number).

        A token's heads lie side by side: to pack them one by one takes twice as long.
        """
        most = max(1, PACKED // max(1, (rows + nk) * d))
        count = -(-nheads_kv // most)
        bounds = [nheads_kv * i // count for i in range(count + 1)]
        for first, last in zip(bounds, bounds[1:], strict=False):
            yield first, last - first

    def _parts(
        self, cache_blocks: Iterable[CacheBlock], heads: int, d: int
    ) -> Iterator[tuple[slice, CacheBlock]]:
        """Cache blocks, each with some of the heads of a group at a time.

        One head of a large cache block.  In small ones the overhead of NumPy's calls would
        prevail: each call does as many heads as stay in the cache together with their buffers.
        """
        room = self._blocker.block_q * self._blocker.block_k
        for block in cache_blocks:
            m, b = block.rows.stop - block.rows.start, block.j1 - block.j0
            most = max(1, room // (m * b + 2 * (m + b) * (d + 1)))
            for first in range(0, heads, most):
                yield slice(first, min(first + most, heads)), block

    def _keys(
        self, name: str, x: np.ndarray, hide: np.ndarray, columns: int | None = None
    ) -> np.ndarray:
        """Copy (keys, heads, d) to (heads, keys, columns), 0 where `hide`; default: d and ones.

        A view where nothing would change: BLAS reads the rows of one head as fast as packed ones.
        """
        keys, heads, d = x.shape
        if columns == d and x.dtype == self.dtype and not hide.any():
            return x.swapaxes(0, 1)
        packed = self._get(name, (heads, keys, columns or d + 1))
        packed[..., :d] = x.swapaxes(0, 1)
        packed[..., d:] = 1
        if hide.any():
            packed[:, hide, :d] = 0
        return packed

    def _pack(
        self, name: str, x: np.ndarray, factor: float, column: np.ndarray | float, hide: np.ndarray
    ) -> np.ndarray:
        """Copy (heads, tokens, group, d) times `factor` to (heads, tokens x group, d + 1).

        `column`, the last one, is (heads, tokens, group) or a number.  Rows of the tokens where
        `hide` is true become 0.
        """
        heads, tokens, group, d = x.shape
        packed = self._get(name, (heads, tokens, group, d + 1))
        # Token by token, as they lie in memory: head by head takes twice as long.
        to = packed[..., :d].swapaxes(0, 1)
        np.multiply(x.swapaxes(0, 1), self.dtype.type(factor), out=to)
        packed[..., d] = column
        if hide.any():
            packed[:, hide] = 0
        return packed.reshape(heads, tokens * group, d + 1)

    def _bounded(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> bool:
        """Prove that exp(logit) and its products with v stay in range without a shift.

        The first axis of q, k and v is the KV head.
        """
        if not (q.size and k.size):
            return True
        norm2 = [float(np.einsum("...d,...d->...", x, x, dtype=self.dtype).max()) for x in (q, k)]
        largest = math.sqrt(norm2[0]) * math.sqrt(norm2[1]) * abs(self.softmax_scale)
        if self.logit_softcap is not None and not math.isnan(largest):
            largest = min(largest, self.logit_softcap)
        # NaN fails the comparisons and takes the general path.
        return largest <= self._half and all(
            size == 0 or self._low < size < self._high / k.shape[1]
            for size in np.maximum(v.max(axis=1), -v.min(axis=1)).max(axis=1).tolist()
        )
