"""The NumPy kernel: online-softmax attention by cache blocks, which stay in the L2 cache.

Most of the time goes into matrix products and one pass of exponentials.  All other work is kept
small beside them:

* Every product is written into a preallocated buffer.
* The running maximum, lse and delta are subtracted by one more column of the first products (a
  column of ones beside k and v).  A soft-cap comes between the product and the subtraction, so
  the subtraction is then a pass of its own.
* Exponentials and their sums are one pass.  The kernel "numba" compiles it, and `largest_norms`
  and `finish` (`a2d_mpi.kernels.compiled`): without AVX-512 ``np.exp`` takes a fifth of a forward
  pass, and in small blocks the number of NumPy calls decides.
* The query heads that share a KV head are rows of one product.
* Visibility is decided once per cache block for all heads (`a2d_mpi.kernels.blocks`).
* In small cache blocks one call of NumPy computes many heads.
* If ``max|q| max|k|`` proves that no exponential can overflow (Cauchy-Schwarz), no maximum is
  computed.  Otherwise the shift of a row is raised only if a logit exceeds it by more than
  `SLACK`.  This check costs one scalar maximum per cache block.

In the comments on shapes, c is the number of KV heads that are packed at once, and x the number of
KV heads that one call of NumPy computes.  g is the number of query heads per KV head.  n is the
number of rows of a query block (tokens x g), m of a cache block, and b its number of keys.  d is
headdim, and e is headdim_v.

Read `forward` first as if `bounded` were true and there were no soft-cap: there is no shift then,
`columns` is d, and a cache block takes a product, `exponentials`, and a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.kernels.blocks import Blocker, CacheBlock, even

Slices = tuple[slice, slice]
SLACK = 10.0  # nats by which a logit may exceed the running maximum of its row
BLOCK_Q = 512  # most rows of a cache block: query tokens x query heads per KV head
BLOCK_K = 512  # most keys of a cache block
PACKED = 9 << 19  # most elements of a tensor that are packed at once, if of several heads


class NumpyKernel:
    """The kernel for NumPy arrays: attention of queries over keys, forward and backward.

    Parameters
    ----------
    dtype : dtype
        Dtype of the tensors; float16 and bfloat16 are computed in float32.
    softmax_scale : float
    poll : callable, optional
        Function that is called between cache blocks, about every millisecond.  It lets MPI move
        large messages, which happens only inside MPI calls.
    work : Workspace, optional
        Buffers of the kernel.
    logit_softcap : float, optional
        c > 0: scaled logits s become ``c tanh(s / c)``, with the derivative
        ``1 - tanh(s / c)^2``.

    Notes
    -----
    The types of the arguments are in `a2d_mpi.kernels.protocol.Kernel`.

    A kernel keeps its buffers between calls, and `Intervals` objects keep their cache blocks.
    Threads must not share a kernel.
    """

    name = "numpy"  # `make_kernel` says whether the passes are compiled

    def __init__(
        self,
        dtype: np.typing.DTypeLike,
        softmax_scale: float,
        poll: Callable[[], object] | None = None,
        work: Workspace | None = None,
        logit_softcap: float | None = None,
        **_: Any,
    ) -> None:
        self.dtype = compute_dtype(np.dtype(dtype))
        self.softmax_scale, self.logit_softcap = softmax_scale, logit_softcap
        self.poll = poll or (lambda: None)
        self._work, self._blocker = work or Workspace(), Blocker(BLOCK_Q, BLOCK_K)
        # exp(+-half), and its products with values between low and high, neither overflow nor
        # underflow.
        info = np.finfo(self.dtype)
        self._half = math.log(info.max) / 2
        self._high = math.exp(self._half)
        self._low = float(info.tiny / info.eps) * self._high

    def forward(self, q, k, v, intervals, out, lse, careful=False) -> None:
        """Overwrite `out` and `lse` with the partial result of the queries over the keys.

        Parameters
        ----------
        q : (nq, nheads, headdim)
        k : (nk, nheads_kv, headdim)
        v : (nk, nheads_kv, headdim_v)
        intervals : tuple of (begin, end), each (nq,) int
            Visible keys of each query, as places in `k`.
        out : (nq, nheads, headdim_v)
            Partial out; 0 in masked rows.
        lse : (nq, nheads)
            Partial lse in nats; -inf in masked rows.
        careful : bool
            Whether elements may be NaN or infinite.  Products of cache blocks would spread these
            to hidden pairs, because 0 times NaN is NaN.  With True, results that do not depend on
            these elements stay correct.
        """
        nheads, d = q.shape[1:]
        nk, nheads_kv, e = v.shape
        g = nheads // nheads_kv
        query_blocks, most, masked_rows, masked_keys = self._blocker.blocking(intervals, nk, g)
        get, capped = self._get, self.logit_softcap is not None
        bounded = self._bounded(q, k, v, masked_rows, masked_keys)
        columns = d if bounded or capped else d + 1
        for group in self._groups(nheads_kv, most, nk, max(d, e)):
            c, heads_kv = len(group), slice(group.start, group.stop)
            heads = slice(group.start * g, group.stop * g)
            kh = self._keys("k", k[:, heads_kv], masked_keys, columns)  # (c, nk, d), or d + 1
            vh = self._keys("v", v[:, heads_kv], masked_keys, e)  # (c, nk, e)
            for i0, i1, cache_blocks in query_blocks:
                n, here = (i1 - i0) * g, (slice(i0, i1), heads)
                hide = None if masked_rows is None else masked_rows[i0:i1]
                # (c, n, d), or d + 1: the last column is minus the shift.
                column = None if columns == d else 0
                qb = self._pack("q", q[here], c, self.softmax_scale, column, hide)
                acc, total = get("acc", (c, n, e)), get("total", (c, n))
                total[:] = 0
                shift = None if bounded else np.zeros((c, n), self.dtype)
                # The first product is written directly to the sum.
                direct = bounded and bool(cache_blocks) and cache_blocks[0].rows == slice(0, n)
                if not direct:
                    acc[:] = 0
                sees = None if bounded else np.zeros((c, n), bool)  # rows that have seen a key
                for block, at, keys, (x, m, b) in self._by_heads(cache_blocks, c, max(d, e)):
                    differ, hidden = block.differ, block.hidden
                    s, total_at = get("scores", (x, m, b)), total[at]
                    # (x, m, b) = (x, m, d) @ (x, d, b)
                    np.matmul(qb[at], _t(kh[keys]), out=s)
                    if capped:
                        self._cap(s)
                    if bounded:
                        self.exponentials(s, total_at, differ, hidden)  # (x, m, b): p
                    else:
                        if capped:
                            s -= shift[at][..., None]
                        if hidden is not None:
                            np.copyto(s[:, differ], -np.inf, where=hidden)
                        _raise(s, shift[at], sees[at], (acc[at], total_at[..., None]))
                        if not capped:
                            qb[at][..., d] = -shift[at]
                        self.exponentials(s, total_at, None, None)
                    shown = self._shown(block) if careful else None
                    if direct and block is cache_blocks[0]:
                        self._product(s, vh[keys], shown, acc[at])  # (x, m, e) = p @ v
                    else:
                        partial = get("partial", (x, m, e))
                        self._product(s, vh[keys], shown, partial)
                        acc[at] += partial
                    self.poll()
                self.finish(acc, total, shift, out[here], lse[here])

    def backward(
        self, dout, q, k, v, lse, delta, intervals, dq, dk, dv, fresh=False, careful=False, **_
    ) -> None:
        """Add the gradients of this block to `dq`, `dk` and `dv`.

        Parameters
        ----------
        dout : (nq, nheads, headdim_v)
        q : (nq, nheads, headdim)
        k : (nk, nheads_kv, headdim)
        v : (nk, nheads_kv, headdim_v)
        lse, delta : (nq, nheads)
            lse over all keys of the sequence, in nats, and ``delta = rowsum(dout * out)``.
        intervals : tuple of (begin, end), each (nq,) int
            Visible keys of each query, as places in `k`.
        dq, dk, dv
            Gradients with the shapes of q, k and v.
        fresh : bool
            Whether to overwrite dq, dk and dv instead.  They may then have the tensors' dtype.
        careful : bool
            As of `forward`.

        Notes
        -----
        ``p = exp(s - lse)``, ``ds = p (dout v^T - delta)``, ``dv += p^T dout``,
        ``dk += scale ds^T q``, ``dq += scale ds k`` (FlashAttention-2, arXiv:2307.08691, alg. 2).
        With a soft-cap, ds is multiplied by the derivative of the cap.
        """
        nheads, d = q.shape[1:]
        nk, nheads_kv, e = v.shape
        g = nheads // nheads_kv
        query_blocks, most, masked_rows, masked_keys = self._blocker.blocking(intervals, nk, g)
        get = self._get
        for group in self._groups(nheads_kv, most, nk, max(d, e)):
            c, heads_kv = len(group), slice(group.start, group.stop)
            heads = slice(group.start * g, group.stop * g)
            # A column of ones at the end.
            kh = self._keys("k", k[:, heads_kv], masked_keys)  # (c, nk, d + 1)
            vh = self._keys("v", v[:, heads_kv], masked_keys)  # (c, nk, e + 1)
            dkh, dvh = get("dk", (c, nk, d)), get("dv", (c, nk, e))
            dkh[:] = dvh[:] = 0
            for i0, i1, cache_blocks in query_blocks:
                n, here = (i1 - i0) * g, (slice(i0, i1), heads)
                # The lse of masked rows may be -inf.
                hide = None if masked_rows is None else masked_rows[i0:i1]
                # (c, n, d + 1), (c, n, e + 1)
                qb = self._pack("q", q[here], c, self.softmax_scale, -lse[here], hide)
                db = self._pack("dout", dout[here], c, 1, -delta[here], hide)
                dqb = get("dq", (c, n, d))
                dqb[:] = 0
                for block, at, keys, (x, m, b) in self._by_heads(cache_blocks, c, max(d, e)):
                    differ, hidden = block.differ, block.hidden
                    p, ds = get("scores", (x, m, b)), get("dscores", (x, m, b))
                    # The three share a buffer: each one is added before the next one is written.
                    partial_k, partial_q = get("partial", (x, b, d)), get("partial", (x, m, d))
                    partial_v = get("partial", (x, b, e))
                    if self.logit_softcap is None:
                        np.matmul(qb[at], _t(kh[keys]), out=p)  # (x, m, b): s - lse
                    else:
                        np.matmul(qb[at][..., :d], _t(kh[keys][..., :d]), out=p)  # (x, m, b): s
                        slope = get("slope", (x, m, b))
                        self._cap(p, slope)
                        p += qb[at][..., d:]
                    self.exponentials(p, None, differ, hidden)  # (x, m, b)
                    shown = self._shown(block) if careful else None
                    shown_t = None if shown is None else shown.T
                    self._product(_t(p), db[at][..., :e], shown_t, partial_v)  # p.T @ dout
                    dvh[keys] += partial_v  # (x, b, e)
                    np.matmul(db[at], _t(vh[keys]), out=ds)  # (x, m, b): dp - delta
                    ds *= p
                    if self.logit_softcap is not None:
                        ds *= slope
                    if careful and hidden is not None:
                        np.copyto(ds[:, differ], 0, where=hidden)
                    # The packed q is already multiplied by softmax_scale.
                    self._product(_t(ds), qb[at][..., :d], shown_t, partial_k)  # ds.T @ q
                    dkh[keys] += partial_k  # (x, b, d)
                    self._product(ds, kh[keys][..., :d], shown, partial_q)  # ds @ k
                    dqb[at] += partial_q  # (x, m, d)
                    self.poll()
                dqb *= self.dtype.type(self.softmax_scale)  # (c, n, d)
                to = dq[here].reshape(-1, c, g, d).swapaxes(0, 1)
                _put(to, dqb.reshape(c, -1, g, d), fresh)
            _put(dk[:, heads_kv].swapaxes(0, 1), dkh, fresh)
            _put(dv[:, heads_kv].swapaxes(0, 1), dvh, fresh)

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

    def _groups(self, nheads_kv: int, rows: int, nk: int, d: int) -> list[range]:
        """Return the KV heads that are packed at once.

        The heads of a token are adjacent in memory, so packing head by head takes twice as long.
        """
        return [range(*x) for x in even(0, nheads_kv, max(1, PACKED // max(1, (rows + nk) * d)))]

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


def _raise(s: Array, shift: Array, sees: Array, sums: tuple[Array, ...]) -> None:
    """Raise the shift of rows whose logits exceed it by too much, and rescale their sums.

    `s` is (heads, rows, keys), `shift` and `sees` (heads, rows), and `sums` (heads, rows, ...).
    """
    if sees.all() and s.max() <= SLACK:
        return
    rise = s.max(axis=-1)
    new = ~sees & ~np.isneginf(rise)
    sees |= new
    # The first visible keys of a row set its shift; later keys only raise it.
    rise[~new] = np.maximum(rise[~new], 0)
    rise[~sees] = 0
    s -= rise[..., None]
    shift += rise
    scale = np.exp(-np.maximum(rise, 0))[..., None]
    for x in sums:
        x *= scale


def _t(x: Array) -> Array:
    """Transpose matrices."""
    return x.swapaxes(-1, -2)


def _put(to: Array, x: Array, fresh: bool) -> None:
    if fresh:
        to[...] = x
    else:
        to += x
