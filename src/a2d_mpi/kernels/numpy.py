"""The NumPy kernel: online-softmax attention by cache blocks, which stay in the L2 cache.

The time goes into the matrix products and one pass of exponentials; everything else is arranged
to vanish beside them:

* every product is written into a preallocated buffer;
* the subtraction of the running maximum, of lse and of delta is one more column of the first
  products (a column of ones beside k and v), and sums of exponentials are products with ones;
  under a soft-cap, which comes between the product and the subtraction, the latter is a pass;
* the query heads that share a KV head are rows of one product;
* visibility is decided per cache block (`a2d_mpi.kernels.blocks`), for all heads at once;
* in small cache blocks one call of NumPy does many heads;
* where ``max|q| max|k|`` proves that no exponential can overflow (Cauchy-Schwarz), no maximum
  is taken.  Otherwise the shift of a row is raised only when some logit exceeds it by more than
  `SLACK`, which costs one scalar maximum a cache block.

In the comments on shapes, c is the number of KV heads that are packed at once, x that of those
which one call of NumPy does, g the query heads per KV head, n the rows of a query block
(tokens x g), m those of a cache block, b its keys, d the headdim.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from a2d_mpi.core.masks import Interval
from a2d_mpi.devices.protocol import Array
from a2d_mpi.devices.workspace import Workspace
from a2d_mpi.kernels.blocks import Blocker
from a2d_mpi.kernels.packing import Packing

BLOCK_Q = 512  # rows of a cache block: query tokens x query heads per KV head
BLOCK_K = 512  # keys of a cache block
SLACK = 10.0  # nats by which a logit may exceed the running maximum of its row


class NumpyKernel(Packing):
    """Attention of some queries over some keys, forward and backward.

    Parameters
    ----------
    dtype : dtype
        Of the tensors; float16 and bfloat16 are computed in float32.
    softmax_scale : float
    poll : callable, optional
        Called between cache blocks (about every millisecond): MPI moves large messages only inside
        MPI calls, and NumPy holds the core.
    block_q, block_k : int
        Rows and keys of a cache block, at most.
    work : Workspace, optional
        Holds the buffers of the kernel.
    logit_softcap : float, optional
        c: scaled logits s become ``c tanh(s / c)``, with the derivative ``1 - tanh(s / c)^2``.

    Attributes
    ----------
    careful : bool
        True: NaN and infinite elements stay away from results that do not depend on them.  0 times
        NaN is NaN: products of a cache block spread such elements to pairs that a mask hides.
        False, the default: there are no such elements.

    Notes
    -----
    A kernel keeps its buffers and the blocking of intervals between calls: intervals must not
    change.  Threads must not share a kernel.
    """

    def __init__(
        self,
        dtype: np.typing.DTypeLike,
        softmax_scale: float,
        poll: Callable[[], object] | None = None,
        block_q: int = BLOCK_Q,
        block_k: int = BLOCK_K,
        work: Workspace | None = None,
        logit_softcap: float | None = None,
    ) -> None:
        blocker = Blocker(block_q, block_k)
        super().__init__(dtype, softmax_scale, blocker, work or Workspace(), logit_softcap)
        self.poll = poll or (lambda: None)

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        intervals: tuple[Interval, ...],
        out: Array,
        lse: Array,
    ) -> None:
        """Overwrite `out` and `lse` with the partial result of these queries over these keys.

        Parameters
        ----------
        q : (nq, nheads, headdim)
        k, v : (nk, nheads_kv, headdim)
        intervals : tuple of (begin, end), each (nq,) int
            Visible keys of each query, as positions in `k`.
        out : (nq, nheads, headdim)
            0 in masked rows.
        lse : (nq, nheads)
            Nats; -inf in masked rows.
        """
        nheads, d = q.shape[1:]
        nk, nheads_kv = k.shape[:2]
        g = nheads // nheads_kv
        query_blocks, most, masked, unseen = self._blocker.blocking(intervals, nk, g)
        get = self._get
        ones = get("ones", (self._blocker.block_k,))
        ones[:] = 1
        for first, c in self._groups(nheads_kv, most, nk, d):
            heads = slice(first * g, (first + c) * g)
            heads_kv = slice(first, first + c)
            kh, vh = (
                self._keys(x, y[:, heads_kv], unseen, columns=d) for x, y in (("k", k), ("v", v))
            )  # (c, nk, d)
            q_of, out_of, lse_of = (
                _by_head(x[:, heads], c) for x in (q, out, lse)
            )  # (c, nq, g, d), and (c, nq, g)
            seeing = q_of[:, ~masked] if masked.any() else q_of
            bounded = self._bounded(seeing, kh, vh)
            if not bounded:
                kh = self._keys("k", k[:, heads_kv], unseen)  # (c, nk, d + 1)
            for i0, i1, cache_blocks in query_blocks:
                n = (i1 - i0) * g
                # The last column is minus the shift.
                qb = self._pack(
                    "q", q_of[:, i0:i1], self.softmax_scale, 0, masked[i0:i1]
                )  # (c, n, d + 1)
                acc = get("acc", (c, n, d))
                shift, total = get("shift", (c, n)), get("total", (c, n))
                acc[:] = shift[:] = total[:] = 0
                sees = np.zeros((c, n), bool)  # rows whose shift is set by a visible key
                for part, (rows, j0, j1, differ, hidden) in self._parts(cache_blocks, c, d):
                    at, x, b = (part, rows), part.stop - part.start, j1 - j0
                    m = rows.stop - rows.start
                    s, partial = get("scores", (x, m, b)), get("partial", (x, m, d))
                    columns = d if bounded or self.logit_softcap is not None else d + 1
                    q_rows, kt = qb[at][..., :columns], _t(kh[part, j0:j1, :columns])
                    np.matmul(q_rows, kt, out=s)  # (x, m, b) = (x, m, d) @ (x, d, b)
                    if self.logit_softcap is not None:
                        self._cap(s)
                        if not bounded:
                            s -= shift[at][..., None]
                    if hidden is not None:
                        np.copyto(s[:, differ], -np.inf, where=hidden)
                    if not (bounded or (sees[at].all() and s.max() <= SLACK)):
                        rise = s.max(axis=-1)  # (x, m)
                        new = ~sees[at] & ~np.isneginf(rise)
                        sees[at] |= new
                        # The first key that a row sees sets its shift; later ones only raise it.
                        rise[~new] = np.maximum(rise[~new], 0)
                        rise[~sees[at]] = 0
                        s -= rise[..., None]
                        shift[at] += rise
                        qb[at][..., d] = -shift[at]
                        scale = np.exp(-np.maximum(rise, 0))  # (x, m)
                        acc[at] *= scale[..., None]
                        total[at] *= scale
                    np.exp(s, out=s)  # (x, m, b): p
                    shown = self._shown(m, b, differ, hidden)
                    self._product(s, vh[part, j0:j1], shown, partial)  # (x, m, d) = p @ v
                    acc[at] += partial
                    total[at] += np.matmul(s, ones[:b])  # (x, m)
                    self.poll()
                with np.errstate(divide="ignore"):
                    lse_of[:, i0:i1] = (np.log(total) + shift).reshape(c, i1 - i0, g)
                total[total == 0] = 1
                acc /= total[..., None]  # (c, n, d)
                out_of[:, i0:i1] = acc.reshape(c, i1 - i0, g, d)

    def backward(
        self,
        dout: Array,
        q: Array,
        k: Array,
        v: Array,
        lse: Array,
        delta: Array,
        intervals: tuple[Interval, ...],
        dq: Array,
        dk: Array,
        dv: Array,
        fresh: bool = False,
    ) -> None:
        """Add the gradients of this block to `dq`, `dk` and `dv`.

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
        fresh : bool
            Overwrite dq, dk and dv instead, which may then be of the tensors' dtype.

        Notes
        -----
        ``p = exp(s - lse)``, ``ds = p (dout v^T - delta)``, ``dv += p^T dout``,
        ``dk += scale ds^T q``, ``dq += scale ds k`` (FlashAttention-2, arXiv:2307.08691, alg. 2);
        under a soft-cap ds has its derivative as a factor.
        """
        nheads, d = q.shape[1:]
        nk, nheads_kv = k.shape[:2]
        g = nheads // nheads_kv
        query_blocks, most, masked, unseen = self._blocker.blocking(intervals, nk, g)
        get = self._get
        for first, c in self._groups(nheads_kv, most, nk, d):
            heads, heads_kv = slice(first * g, (first + c) * g), slice(first, first + c)
            kh, vh = (
                self._keys(x, y[:, heads_kv], unseen) for x, y in (("k", k), ("v", v))
            )  # (c, nk, d + 1): a column of ones at the end
            q_of, dout_of, lse_of, delta_of, dq_of = (
                _by_head(x[:, heads], c) for x in (q, dout, lse, delta, dq)
            )  # (c, nq, g, d), and (c, nq, g)
            dkh, dvh = get("dk", (c, nk, d)), get("dv", (c, nk, d))
            dkh[:] = dvh[:] = 0
            for i0, i1, cache_blocks in query_blocks:
                n = (i1 - i0) * g
                hide = masked[i0:i1]  # lse of masked rows may be -inf
                scale, shift = self.softmax_scale, -lse_of[:, i0:i1]
                delta_b = -delta_of[:, i0:i1]
                qb = self._pack("q", q_of[:, i0:i1], scale, shift, hide)  # (c, n, d + 1)
                db = self._pack("dout", dout_of[:, i0:i1], 1, delta_b, hide)  # (c, n, d + 1)
                dqb = get("dq", (c, n, d))
                dqb[:] = 0
                for part, (rows, j0, j1, differ, hidden) in self._parts(cache_blocks, c, d):
                    at, keys, x = (part, rows), (part, slice(j0, j1)), part.stop - part.start
                    m, b = rows.stop - rows.start, j1 - j0
                    p, ds = get("scores", (x, m, b)), get("dscores", (x, m, b))
                    # One buffer: each sum is added before the next one is written.
                    partial_k, partial_q = get("partial", (x, b, d)), get("partial", (x, m, d))
                    if self.logit_softcap is None:
                        np.matmul(qb[at], _t(kh[keys]), out=p)  # (x, m, b): s - lse
                    else:
                        np.matmul(qb[at][..., :d], _t(kh[keys][..., :d]), out=p)  # (x, m, b): s
                        slope = get("slope", (x, m, b))
                        self._cap(p, slope)
                        p += qb[at][..., d:]
                    if hidden is not None:
                        np.copyto(p[:, differ], -np.inf, where=hidden)
                    np.exp(p, out=p)  # (x, m, b)
                    shown = self._shown(m, b, differ, hidden)
                    shown_t = None if shown is None else shown.T
                    self._product(_t(p), db[at][..., :d], shown_t, partial_k)  # p.T @ dout
                    dvh[keys] += partial_k  # (x, b, d)
                    np.matmul(db[at], _t(vh[keys]), out=ds)  # (x, m, b): dp - delta
                    ds *= p
                    if self.logit_softcap is not None:
                        ds *= slope
                    if self.careful and hidden is not None:
                        np.copyto(ds[:, differ], 0, where=hidden)
                    # The packed q carries softmax_scale already.
                    self._product(_t(ds), qb[at][..., :d], shown_t, partial_k)  # ds.T @ q
                    dkh[keys] += partial_k  # (x, b, d)
                    self._product(ds, kh[keys][..., :d], shown, partial_q)  # ds @ k
                    dqb[at] += partial_q  # (x, m, d)
                    self.poll()
                dqb *= self.dtype.type(self.softmax_scale)  # (c, n, d)
                _put(dq_of[:, i0:i1], dqb.reshape(c, i1 - i0, g, d), fresh)
            _put(dk[:, heads_kv].swapaxes(0, 1), dkh, fresh)
            _put(dv[:, heads_kv].swapaxes(0, 1), dvh, fresh)


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
