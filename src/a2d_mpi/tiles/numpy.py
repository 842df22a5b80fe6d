"""The tile kernel on NumPy: online-softmax attention by blocks that stay in the L2 cache.

The time goes into the matrix products and one pass of exponentials; everything else is arranged
to vanish beside them:

* every block product is written into a preallocated buffer;
* the subtraction of the running maximum, of lse and of delta is one more column of the first
  products (a column of ones beside k and v), and sums of exponentials are products with ones;
* the query heads that share a key head are rows of one product;
* visibility is decided per block: hidden blocks are skipped, only blocks that an interval cuts
  take a mask, and the mask is shared by all heads;
* where ``max|q| max|k|`` proves that no exponential can overflow (Cauchy-Schwarz), no maximum
  is taken.  Otherwise the shift of a row is raised only when some logit exceeds it by more than
  `SLACK`, which costs one scalar maximum a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from a2d_mpi.backend import Workspace, compute_dtype
from a2d_mpi.masks import Interval

BLOCK_Q = 512  # rows of a block: query tokens x query heads per key head
BLOCK_K = 512  # keys of a block
ALIGN = 32  # keys: full blocks begin and end at multiples of it where an interval allows
SLACK = 10.0  # nats by which a logit may exceed the running maximum of its row


# Rows of a block, keys [j0, j1) that they see, and which pairs are hidden, if some are.
Piece = tuple[slice, int, int, "np.ndarray | None"]
RowBlock = tuple[int, int, "list[Piece]"]  # query tokens [i0, i1) and what they see


class NumpyTile:
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

    Notes
    -----
    A tile object keeps its buffers between calls; it is not to be shared by threads.
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
        self.block_q, self.block_k = block_q, block_k
        self._work = work or Workspace()

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
        blocks, most = self._blocks(intervals, nk, g)
        blind, unseen = _outside(intervals, nk)
        get = self._get
        seeing = q[~blind] if blind.any() else q
        scores, ones = get("scores", (most * self.block_k,)), get("ones", (self.block_k,))
        ones[:] = 1
        part, acc = get("part", (most, d)), get("acc", (most, d))
        kh, vh = get("k", (nk, d + 1)), get("v", (nk, d))
        kh[:, d] = 1
        for h in range(nheads_kv):
            heads = slice(h * g, (h + 1) * g)
            kh[:, :d], vh[:] = k[:, h], v[:, h]
            kh[unseen, :d] = vh[unseen] = 0
            bounded = self._bounded(seeing[:, heads], kh[:, :d], vh)
            for i0, i1, pieces in blocks:
                n = (i1 - i0) * g
                # The last column is minus the shift.
                qb = self._pack("q", q[i0:i1, heads], self.softmax_scale, 0, blind[i0:i1])
                shift, total = get("shift", (n,)), get("total", (n,))
                acc[:n] = shift[:] = total[:] = 0
                sees = np.zeros(n, bool)  # rows whose shift is set by a visible key
                for rows, j0, j1, hidden in pieces:
                    m = rows.stop - rows.start
                    s = scores[: m * (j1 - j0)].reshape(m, j1 - j0)
                    if bounded:
                        np.matmul(qb[rows, :d], kh[j0:j1, :d].T, out=s)
                    else:
                        np.matmul(qb[rows], kh[j0:j1].T, out=s)
                    if hidden is not None:
                        np.copyto(s, -np.inf, where=hidden)
                    if not (bounded or (sees[rows].all() and s.max() <= SLACK)):
                        rise = s.max(axis=1)
                        new = ~sees[rows] & ~np.isneginf(rise)
                        sees[rows] |= new
                        # The first key that a row sees sets its shift; later ones only raise it.
                        rise[~new] = np.maximum(rise[~new], 0)
                        rise[~sees[rows]] = 0
                        s -= rise[:, None]
                        shift[rows] += rise
                        qb[rows, d] = -shift[rows]
                        scale = np.exp(-np.maximum(rise, 0))
                        acc[rows] *= scale[:, None]
                        total[rows] *= scale
                    np.exp(s, out=s)
                    np.matmul(s, vh[j0:j1], out=part[:m])
                    acc[rows] += part[:m]
                    total[rows] += np.matmul(s, ones[: j1 - j0])
                    self.poll()
                with np.errstate(divide="ignore"):
                    lse[i0:i1, heads] = (np.log(total) + shift).reshape(-1, g)
                total[total == 0] = 1
                acc[:n] /= total[:, None]
                out[i0:i1, heads] = acc[:n].reshape(-1, g, d)

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
        blocks, most = self._blocks(intervals, nk, g)
        blind, unseen = _outside(intervals, nk)
        get = self._get
        scores, dscores = (get(name, (most * self.block_k,)) for name in ("scores", "dscores"))
        part = get("part", (max(most, self.block_k), d))
        kh, vh = get("k", (nk, d + 1)), get("v", (nk, d + 1))
        kh[:, d] = vh[:, d] = 1
        dkh, dvh = get("dk", (nk, d)), get("dv", (nk, d))
        for h in range(nheads_kv):
            heads = slice(h * g, (h + 1) * g)
            kh[:, :d], vh[:, :d] = k[:, h], v[:, h]
            kh[unseen, :d] = vh[unseen, :d] = 0
            dkh[:] = dvh[:] = 0
            for i0, i1, pieces in blocks:
                n = (i1 - i0) * g
                hide = blind[i0:i1]  # their lse may be -inf
                scale, shift = self.softmax_scale, -lse[i0:i1, heads]
                qb = self._pack("q", q[i0:i1, heads], scale, shift, hide)
                db = self._pack("dout", dout[i0:i1, heads], 1, -delta[i0:i1, heads], hide)
                dqb = get("dq", (n, d))
                dqb[:] = 0
                for rows, j0, j1, hidden in pieces:
                    m, keys = rows.stop - rows.start, j1 - j0
                    p, ds = (x[: m * keys].reshape(m, keys) for x in (scores, dscores))
                    np.matmul(qb[rows], kh[j0:j1].T, out=p)
                    if hidden is not None:
                        np.copyto(p, -np.inf, where=hidden)
                    np.exp(p, out=p)
                    np.matmul(p.T, db[rows, :d], out=part[:keys])
                    dvh[j0:j1] += part[:keys]
                    np.matmul(db[rows], vh[j0:j1].T, out=ds)
                    ds *= p
                    # The packed q carries softmax_scale already.
                    np.matmul(ds.T, qb[rows, :d], out=part[:keys])
                    dkh[j0:j1] += part[:keys]
                    np.matmul(ds, kh[j0:j1, :d], out=part[:m])
                    dqb[rows] += part[:m]
                    self.poll()
                dqb *= self.dtype.type(self.softmax_scale)
                _put(dq[i0:i1, heads], dqb.reshape(-1, g, d), fresh)
            _put(dk[:, h], dkh, fresh)
            _put(dv[:, h], dvh, fresh)

    def _get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._work.get(("tile", name), shape, self.dtype)

    def _pack(
        self, name: str, x: np.ndarray, factor: float, column: np.ndarray | float, hide: np.ndarray
    ) -> np.ndarray:
        """Copy (tokens, group, d) times `factor` to contiguous rows with one more column.

        `column` is (tokens, group) or a number; all of the tokens where `hide` is true becomes 0.
        """
        tokens, group, d = x.shape
        packed = self._get(name, (tokens, group, d + 1))
        np.multiply(x, self.dtype.type(factor), out=packed[..., :d])
        packed[..., d] = column
        packed[hide] = 0
        return packed.reshape(tokens * group, d + 1)

    def _bounded(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> bool:
        """Whether exp(logit) and its products with v provably stay in range without a shift."""
        if not (q.size and k.size):
            return True
        norm2 = [float(np.einsum("...d,...d->...", x, x, dtype=self.dtype).max()) for x in (q, k)]
        largest = math.sqrt(norm2[0]) * math.sqrt(norm2[1]) * abs(self.softmax_scale)
        half = math.log(np.finfo(self.dtype).max) / 2
        size = float(np.abs(v).max())
        floor = float(np.finfo(self.dtype).tiny / np.finfo(self.dtype).eps)
        # NaN fails the comparisons and takes the general path.
        return largest <= half and (
            size == 0 or floor * math.exp(half) < size < math.exp(half) / len(k)
        )

    def _blocks(
        self, intervals: tuple[Interval, ...], nk: int, group: int
    ) -> tuple[list[RowBlock], int]:
        """Cut the tile into blocks; return them and the largest number of rows of one."""
        ends = np.stack([x for pair in intervals for x in pair])
        nq = ends.shape[1]
        step = max(1, self.block_q // group)
        # Rows of very different intervals never share a block.
        jumps = np.abs(np.diff(ends, axis=1)).max(axis=0, initial=0) > self.block_q
        cuts = [0, *(np.flatnonzero(jumps) + 1).tolist(), nq]
        blocks = []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            for i0 in range(start, stop, step):
                i1 = min(i0 + step, stop)
                pieces = self._pieces(ends[:, i0:i1], 0, 0, nk, group)
                blocks.append((i0, i1, list(pieces)))
        return blocks, min(step, nq) * group

    def _pieces(self, ends: np.ndarray, row: int, a: int, b: int, group: int) -> Iterator[Piece]:
        """Cut what the tokens of `ends`, from `row` on, see of the keys [a, b)."""
        begins, stops = ends[0::2], ends[1::2]
        tokens = ends.shape[1]
        # Between two neighbouring edges all rows see all keys, or none, or they differ.  The
        # edges of what all rows see move inwards to a round number, for even block products.
        inner = np.concatenate([-(-begins.max(axis=1) // ALIGN), stops.min(axis=1) // ALIGN])
        outer = np.concatenate([begins.min(axis=1), stops.max(axis=1)])
        edges = np.unique(np.concatenate([[a, b], inner * ALIGN, outer]).clip(a, b)).tolist()
        for x, y in zip(edges, edges[1:], strict=False):
            full = ((begins <= x) & (stops >= y)).any(axis=0).all()
            if not (full or ((begins < y) & (stops > x)).any()):
                continue
            if not full and tokens * group > self.block_q // 4 and tokens > 1:
                # Fewer rows differ less: less work is thrown away.
                half = tokens // 2
                yield from self._pieces(ends[:, :half], row, x, y, group)
                yield from self._pieces(ends[:, half:], row + half, x, y, group)
                continue
            pieces = -(-(y - x) // self.block_k)
            bounds = [x + (y - x) * i // pieces for i in range(pieces + 1)]
            for j0, j1 in zip(bounds, bounds[1:], strict=False):
                hidden = None
                if not full:
                    keys = np.arange(j0, j1)
                    seen = np.zeros((tokens, j1 - j0), bool)
                    for begin, end in zip(begins, stops, strict=True):
                        seen |= (keys >= begin[:, None]) & (keys < end[:, None])
                    hidden = np.repeat(~seen, group, axis=0)
                yield slice(row * group, (row + tokens) * group), j0, j1, hidden


def _put(to: np.ndarray, x: np.ndarray, fresh: bool) -> None:
    if fresh:
        to[...] = x
    else:
        to += x


def _outside(intervals: tuple[Interval, ...], nk: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries that see no key, and keys that no query sees: padding, which may hold anything.

    They count as zeros, for 0 times NaN is NaN.
    """
    change = np.zeros(nk + 1, np.int64)
    for begin, end in intervals:
        np.add.at(change, begin, 1)
        np.add.at(change, end, -1)
    blind = np.all([end <= begin for begin, end in intervals], axis=0)
    return blind, np.cumsum(change[:-1]) == 0
