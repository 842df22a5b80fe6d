"""The tile kernel on NumPy: online-softmax attention by blocks that stay in the L2 cache.

The time goes into the matrix products and one pass of exponentials; everything else is arranged
to vanish beside them:

* every block product is written into a preallocated buffer;
* the subtraction of the running maximum, of lse and of delta is one more column of the first
  products (a column of ones beside k and v), and sums of exponentials are products with ones;
* the query heads that share a key head are rows of one product;
* visibility is decided per block (`a2d_mpi.kernels.blocks`), for all heads at once;
* with small tiles one call of NumPy does many heads;
* where ``max|q| max|k|`` proves that no exponential can overflow (Cauchy-Schwarz), no maximum
  is taken.  Otherwise the shift of a row is raised only when some logit exceeds it by more than
  `SLACK`, which costs one scalar maximum a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from a2d_mpi.core.dtypes import compute_dtype
from a2d_mpi.core.masks import Interval
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.kernels.blocks import Cutter

BLOCK_Q = 512  # rows of a block: query tokens x query heads per key head
BLOCK_K = 512  # keys of a block
SLACK = 10.0  # nats by which a logit may exceed the running maximum of its row


class NumpyKernel:
    """Attention of some queries over some keys, forward and backward.

    Parameters
    ----------
    dtype : dtype
        Of the tensors; float16 and bfloat16 are computed in float32.
    softmax_scale : float
    poll : callable, optional
        Called between blocks (about every millisecond): MPI moves large messages only inside MPI
        calls, and NumPy holds the core.
    block_q, block_k : int
        Block sizes.
    work : Workspace, optional
        Where its buffers lie.

    Attributes
    ----------
    careful : bool
        Whether NaN and infinite elements are to be kept from what does not depend on them: 0
        times NaN is NaN, so the products of a block spread them to pairs that a mask hides.
        False, as at first: there are none.

    Notes
    -----
    A tile object keeps its buffers between calls, and how it cut intervals: they must not change.
    It is not to be shared by threads.
    """

    def __init__(
        self,
        dtype: np.typing.DTypeLike,
        softmax_scale: float,
        poll: Callable[[], object] | None = None,
        block_q: int = BLOCK_Q,
        block_k: int = BLOCK_K,
        work: Workspace | None = None,
    ) -> None:
        self.dtype = compute_dtype(np.dtype(dtype))
        self.softmax_scale = softmax_scale
        self.poll = poll or (lambda: None)
        self.careful = False
        self._work = work or Workspace()
        self._cutter = Cutter(block_q, block_k)
        # exp(+-half) and its products with values between low and high stay in range.
        info = np.finfo(self.dtype)
        self._half = math.log(info.max) / 2
        self._high = math.exp(self._half)
        self._low = float(info.tiny / info.eps) * self._high

    def forward(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        intervals: tuple[Interval, ...],
        out: np.ndarray,
        lse: np.ndarray,
    ) -> None:
        """Write the partial result of these queries over these keys to `out` and `lse`.

        Parameters
        ----------
        q : (nq, nheads, headdim)
        k, v : (nk, nheads_kv, headdim)
        intervals : tuple of (begin, end), each (nq,) int
            Visible keys of each query, as positions in `k`.
        out : (nq, nheads, headdim)
            Overwritten; 0 for a query that sees no key.
        lse : (nq, nheads)
            Overwritten, nats; -inf for a query that sees no key.
        """
        nheads, d = q.shape[1:]
        nk, nheads_kv = k.shape[:2]
        g = nheads // nheads_kv
        blocks, most, blind, unseen = self._cutter.cut(intervals, nk, g)
        get = self._get
        ones = get("ones", (self._cutter.block_k,))
        ones[:] = 1
        for first, c in self._batches(nheads_kv, most, nk, d):
            heads = slice(first * g, (first + c) * g)
            kh = self._keys("k", k[:, first : first + c], unseen)
            vh = self._keys("v", v[:, first : first + c], unseen, columns=d)
            q_of, out_of, lse_of = (_by_head(x[:, heads], c) for x in (q, out, lse))
            seeing = q_of[:, ~blind] if blind.any() else q_of
            bounded = self._bounded(seeing, kh[..., :d], vh)
            for i0, i1, pieces in blocks:
                n = (i1 - i0) * g
                # The last column is minus the shift.
                qb = self._pack("q", q_of[:, i0:i1], self.softmax_scale, 0, blind[i0:i1])
                acc = get("acc", (c, n, d))
                shift, total = get("shift", (c, n)), get("total", (c, n))
                acc[:] = shift[:] = total[:] = 0
                sees = np.zeros((c, n), bool)  # rows whose shift is set by a visible key
                for rows, j0, j1, hidden in pieces:
                    m = rows.stop - rows.start
                    s, part = get("scores", (c, m, j1 - j0)), get("part", (c, m, d))
                    columns = d if bounded else d + 1
                    np.matmul(qb[:, rows, :columns], _t(kh[:, j0:j1, :columns]), out=s)
                    if hidden is not None:
                        np.copyto(s, -np.inf, where=hidden)
                    if not (bounded or (sees[:, rows].all() and s.max() <= SLACK)):
                        rise = s.max(axis=-1)
                        new = ~sees[:, rows] & ~np.isneginf(rise)
                        sees[:, rows] |= new
                        # The first key that a row sees sets its shift; later ones only raise it.
                        rise[~new] = np.maximum(rise[~new], 0)
                        rise[~sees[:, rows]] = 0
                        s -= rise[..., None]
                        shift[:, rows] += rise
                        qb[:, rows, d] = -shift[:, rows]
                        scale = np.exp(-np.maximum(rise, 0))
                        acc[:, rows] *= scale[..., None]
                        total[:, rows] *= scale
                    np.exp(s, out=s)
                    self._product(s, vh[:, j0:j1], hidden, part)
                    acc[:, rows] += part
                    total[:, rows] += np.matmul(s, ones[: j1 - j0])
                    self.poll()
                with np.errstate(divide="ignore"):
                    lse_of[:, i0:i1] = (np.log(total) + shift).reshape(c, i1 - i0, g)
                total[total == 0] = 1
                acc /= total[..., None]
                out_of[:, i0:i1] = acc.reshape(c, i1 - i0, g, d)

    def backward(
        self,
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        lse: np.ndarray,
        delta: np.ndarray,
        intervals: tuple[Interval, ...],
        dq: np.ndarray,
        dk: np.ndarray,
        dv: np.ndarray,
        fresh: bool = False,
    ) -> None:
        """Add the gradients that this tile contributes to `dq`, `dk` and `dv`.

        Parameters
        ----------
        dout, q : (nq, nheads, headdim)
        k, v : (nk, nheads_kv, headdim)
        lse, delta : (nq, nheads)
            Over all keys of the sequence; ``delta = rowsum(dout * out)``.
        intervals : tuple of (begin, end), each (nq,) int
            Visible keys of each query, as positions in `k`.
        dq : (nq, nheads, headdim)
        dk, dv : (nk, nheads_kv, headdim)
            Added to.
        fresh : bool
            dq, dk and dv are overwritten instead; they may be of the tensors' dtype.

        Notes
        -----
        ``p = exp(s - lse)``, ``ds = p (dout v^T - delta)``, ``dv += p^T dout``,
        ``dk += scale ds^T q``, ``dq += scale ds k`` (FlashAttention-2, arXiv:2307.08691, alg. 2).
        """
        nheads, d = q.shape[1:]
        nk, nheads_kv = k.shape[:2]
        g = nheads // nheads_kv
        blocks, most, blind, unseen = self._cutter.cut(intervals, nk, g)
        get = self._get
        for first, c in self._batches(nheads_kv, most, nk, d):
            heads, heads_kv = slice(first * g, (first + c) * g), slice(first, first + c)
            kh, vh = (self._keys(x, y[:, heads_kv], unseen) for x, y in (("k", k), ("v", v)))
            q_of, dout_of, lse_of, delta_of, dq_of = (
                _by_head(x[:, heads], c) for x in (q, dout, lse, delta, dq)
            )
            dkh, dvh = get("dk", (c, nk, d)), get("dv", (c, nk, d))
            dkh[:] = dvh[:] = 0
            for i0, i1, pieces in blocks:
                n = (i1 - i0) * g
                hide = blind[i0:i1]  # their lse may be -inf
                scale, shift = self.softmax_scale, -lse_of[:, i0:i1]
                qb = self._pack("q", q_of[:, i0:i1], scale, shift, hide)
                db = self._pack("dout", dout_of[:, i0:i1], 1, -delta_of[:, i0:i1], hide)
                dqb = get("dq", (c, n, d))
                dqb[:] = 0
                for rows, j0, j1, hidden in pieces:
                    m, keys = rows.stop - rows.start, slice(j0, j1)
                    p, ds = get("scores", (c, m, j1 - j0)), get("dscores", (c, m, j1 - j0))
                    part_k, part_q = get("part", (c, j1 - j0, d)), get("part", (c, m, d))
                    np.matmul(qb[:, rows], _t(kh[:, keys]), out=p)
                    if hidden is not None:
                        np.copyto(p, -np.inf, where=hidden)
                    np.exp(p, out=p)
                    hidden_t = None if hidden is None else hidden.T
                    self._product(_t(p), db[:, rows, :d], hidden_t, part_k)
                    dvh[:, keys] += part_k
                    np.matmul(db[:, rows], _t(vh[:, keys]), out=ds)
                    ds *= p
                    if self.careful and hidden is not None:
                        np.copyto(ds, 0, where=hidden)
                    # The packed q carries softmax_scale already.
                    self._product(_t(ds), qb[:, rows, :d], hidden_t, part_k)
                    dkh[:, keys] += part_k
                    self._product(ds, kh[:, keys, :d], hidden, part_q)
                    dqb[:, rows] += part_q
                    self.poll()
                dqb *= self.dtype.type(self.softmax_scale)
                _put(dq_of[:, i0:i1], dqb.reshape(c, i1 - i0, g, d), fresh)
            _put(dk[:, heads_kv].swapaxes(0, 1), dkh, fresh)
            _put(dv[:, heads_kv].swapaxes(0, 1), dvh, fresh)

    def _get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._work.get(("kernel", name), shape, self.dtype)

    def _product(
        self, weights: np.ndarray, x: np.ndarray, hidden: np.ndarray | None, out: np.ndarray
    ) -> None:
        """``out = weights x``; NaN, if careful, where a row sees such an element of x."""
        bad = ~np.isfinite(x) if self.careful and hidden is not None else None
        if bad is None or not bad.any():
            np.matmul(weights, x, out=out)
            return
        np.matmul(weights, np.where(bad, 0, x), out=out)
        seen = (~hidden).astype(x.dtype) @ bad.astype(x.dtype)
        np.copyto(out, np.nan, where=seen > 0)

    def _batches(self, nheads_kv: int, rows: int, nk: int, d: int) -> Iterator[tuple[int, int]]:
        """Key heads that are done at once, as (first, number).

        Of a large tile it is one.  With small ones NumPy's calls would take longer than what they
        do: each does as many heads as stay in the cache, with what goes with them.
        """
        elements = rows * min(nk, self._cutter.block_k) + 2 * (rows + nk) * (d + 1)
        most = max(1, self._cutter.block_q * self._cutter.block_k // max(1, elements))
        for first in range(0, nheads_kv, most):
            yield first, min(most, nheads_kv - first)

    def _keys(
        self, name: str, x: np.ndarray, hide: np.ndarray, columns: int | None = None
    ) -> np.ndarray:
        """Copy (keys, heads, d) to (heads, keys, columns), 0 where `hide`; default: d and ones."""
        keys, heads, d = x.shape
        packed = self._get(name, (heads, keys, columns or d + 1))
        packed[..., :d] = x.swapaxes(0, 1)
        packed[..., d:] = 1
        if hide.any():
            packed[:, hide, :d] = 0
        return packed

    def _pack(
        self, name: str, x: np.ndarray, factor: float, column: np.ndarray | float, hide: np.ndarray
    ) -> np.ndarray:
        """Copy (heads, tokens, group, d) times `factor` to rows with one more column.

        `column` is (heads, tokens, group) or a number; all of the tokens where `hide` is true
        becomes 0.
        """
        heads, tokens, group, d = x.shape
        packed = self._get(name, (heads, tokens, group, d + 1))
        np.multiply(x, self.dtype.type(factor), out=packed[..., :d])
        packed[..., d] = column
        if hide.any():
            packed[:, hide] = 0
        return packed.reshape(heads, tokens * group, d + 1)

    def _bounded(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> bool:
        """Whether exp(logit) and its products with v provably stay in range without a shift.

        The first axis of all three is the key head.
        """
        if not (q.size and k.size):
            return True
        norm2 = [float(np.einsum("...d,...d->...", x, x, dtype=self.dtype).max()) for x in (q, k)]
        largest = math.sqrt(norm2[0]) * math.sqrt(norm2[1]) * abs(self.softmax_scale)
        # NaN fails the comparisons and takes the general path.
        return largest <= self._half and all(
            size == 0 or self._low < size < self._high / k.shape[1]
            for size in np.abs(v).max(axis=(1, 2)).tolist()
        )


def _by_head(x: np.ndarray, heads: int) -> np.ndarray:
    """(tokens, heads x group, ...) as (heads, tokens, group, ...): a view."""
    tokens, rows, *rest = x.shape
    return x.reshape(tokens, heads, rows // heads, *rest).swapaxes(0, 1)


def _t(x: np.ndarray) -> np.ndarray:
    """Transposed matrices."""
    return x.swapaxes(-1, -2)


def _put(to: np.ndarray, x: np.ndarray, fresh: bool) -> None:
    if fresh:
        to[...] = x
    else:
        to += x
