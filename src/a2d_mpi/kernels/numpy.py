"""The NumPy kernel: online-softmax attention by cache blocks, which stay in the L2 cache.

Most of the time goes into matrix products and one pass of exponentials.  All other work is kept
small beside them:

* Every product is written into a preallocated buffer.
* The running maximum, lse and delta are subtracted by one more column of the first products (a
  column of ones beside k and v).  A soft-cap comes between the product and the subtraction, so
  the subtraction is then a pass of its own.
* Exponentials and their sums are one pass, which is compiled if Numba is there
  (`a2d_mpi.kernels.compiled`).
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
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.kernels.packing import Packing

SLACK = 10.0  # nats by which a logit may exceed the running maximum of its row


class NumpyKernel(Packing):
    """The kernel for NumPy arrays: attention of queries over keys, forward and backward.

    Parameters
    ----------
    dtype : dtype
        Dtype of the tensors; float16 and bfloat16 are computed in float32.
    softmax_scale : float
    poll : callable, optional
        Function that is called between cache blocks, about every millisecond.  It lets MPI move
        large messages, which happens only inside MPI calls.
    block_q, block_k : int
        Most rows and keys of a cache block.
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
    max_logits = True

    def forward(self, q, k, v, intervals, out, lse, careful=False, largest=None) -> None:
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
        largest : (nheads,) accumulation dtype, optional
            Largest visible logit of each head, scaled and not capped.  The numbers are raised to
            the logits of the block, which takes one more pass.
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
                    if largest is not None:
                        shifted = None if bounded or capped else shift[at]
                        raised = largest[heads][at[0].start * g :][: x * g]
                        self._find_largest(s, shifted, block, raised)
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
