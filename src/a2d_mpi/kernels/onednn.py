"""The bfloat16 kernel for CPUs: products by oneDNN, and rows compiled by Numba.

Tensors are copied by head, because oneDNN multiplies contiguous rows fastest (on a Zen 4:
205 to 215 GFLOP/s, and 180 to 200 if the rows of a head lie apart).  Everything else stays in the
16 bits of the tensors, so no tensor is copied to float32:

* Forward, a product of queries and keys gives float32 logits.  One pass over a row makes rounded
  probabilities of them, and a second product adds these times the values to the row's sums.
* The shift of a row is its largest logit in the first cache block.  It is raised only if a later
  logit exceeds it by more than `SLACK`.
* Backward, logits are computed transposed (keys x queries), so that only one of five products
  reads a transposed matrix, and lse and delta are vectors that no row repeats.

In the shapes, g is the number of query heads per KV head, m the number of rows of a cache block
(tokens x g), and b its number of keys.  d is headdim, and e is headdim_v.  Arrays have `GRAIN`
more rows, of zeros, because products have whole grains of rows and keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.kernels.blocks import CacheBlock
from a2d_mpi.kernels.compiled import ONE, ZERO, NumbaKernel, _compile, _exp, _finish, njit
from a2d_mpi.kernels.numpy import _put
from a2d_mpi.kernels.onednn_calls import Product, check_products

_f, _u, _u16 = np.float32, np.uint32, np.dtype(np.uint16)
NONE = _f(-np.inf)
SIGN = np.int32(0x7FFFFFFF)
GRAIN = 32  # products have multiples of it as rows and keys: one for a new shape takes 0.5 ms
SLACK = _f(9.7)  # nats by which a logit may exceed the shift
# The products of a cache block: logits and weighted sums; logits, dp, dv, dk and dq.
FORWARD = "mb = md bd", "me += mb be"
BACKWARD = "bm = bd md", "bm = be me", "be += bm me", "bd += bm md", "md += bm bd"
# Smaller blocks are left to the kernel "numba": fewer rows or keys, or fewer operations of a head.
# On a Zen 4, "numba" took down to a third of the time below, and "onednn" down to 0.7 of it above.
FEWEST = GRAIN
LEAST = 3 << 21


def _whole_grains(n: int) -> int:
    return -(-n // GRAIN) * GRAIN


def _is_small(rows: int, keys: int, widths: int) -> bool:
    return min(rows, keys) < FEWEST or 2 * rows * keys * widths < LEAST


@njit
def _rounded(x: np.float32) -> np.uint16:
    """Return the bits of the nearest bfloat16."""
    return np.uint16(_u(_f(x).view(_u) + _u(0x8000)) >> _u(16))


@njit
def _widened(bits: np.uint16) -> np.float32:
    """Return the number that has these bits."""
    return _u(_u(bits) << _u(16)).view(_f)


# Integers find the largest number, because LLVM does not vectorize a maximum that keeps NaN.
@njit
def _largest(s: Array, factor: np.float32) -> np.float32:
    top = np.int32(-SIGN)
    for j in range(len(s)):
        bits = _f(s[j] * factor).view(np.int32)
        top = max(top, np.int32(bits ^ ((bits >> np.int32(31)) & SIGN)))
    return np.int32(top ^ (np.int32(top) >> np.int32(31) & SIGN)).view(_f)


@njit(fastmath={"contract", "reassoc"})
def _powers(s: Array, factor: np.float32, shift: np.float32, p: Array) -> tuple:
    """Write rounded exponentials to `p`.

    Return the largest exponent, if it is positive, and the sums of the exponentials before and
    after rounding.
    """
    top, exact, rounded = np.int32(-SIGN), ZERO, ZERO
    for j in range(len(s)):
        x = _f(s[j] * factor - shift)
        top = max(top, x.view(np.int32))
        y = _exp(x)
        exact += y
        p[j] = _rounded(y)
        rounded += _widened(p[j])
    return np.int32(top).view(_f), exact, rounded


@_compile("void(f4[:,::1], i8, f4, i8, b1[:,:], f4[::1], f4[:,:], f4[:,::1], u2[:,::1])")
def _weights(s, keys, factor, first, hidden, shift, total, acc, p) -> None:
    """Write the rounded weights of logits to `p`, and add them to `total`.

    There are as many rows as `shift` has; other rows of `p` and other keys get 0.  `hidden` has
    the pairs of the rows from `first` on.  If `shift` rises, `total` and `acc` shrink.
    """
    p[len(shift) :] = 0
    p[:, keys:] = 0
    for row in range(len(shift)):
        x, weights, by = s[row, :keys], p[row, :keys], factor
        if first <= row < first + len(hidden):
            hide = hidden[row - first]
            for j in range(len(x)):
                x[j] = NONE if hide[j] else x[j] * factor
            by = ONE
        old = new = shift[row]
        if new == NONE:
            new = _largest(x, by)
            if new == NONE:
                weights[:] = 0
                continue
        top, exact, rounded = _powers(x, by, new, weights)
        while SLACK < top < np.inf:
            new += top
            top, exact, rounded = _powers(x, by, new, weights)
        shift[row] = new
        if NONE != old != new:
            shrink = _exp(old - new)
            total[:, row] *= shrink
            for j in range(acc.shape[1]):
                acc[row, j] *= shrink
        total[0, row] += exact
        total[1, row] += rounded


@njit(fastmath={"contract"})
def _gradient_row(s, dp, factor, per_cap, lse, delta, p, ds) -> None:
    for i in range(len(s)):
        weight, tanh = _exp(s[i] * factor - lse[i]), s[i] * per_cap
        p[i] = _rounded(weight)
        ds[i] = _rounded(weight * (dp[i] - delta[i]) * (ONE - tanh * tanh))


@_compile(
    "void(f4[:,::1], f4[:,::1], i8, f4, f4, i8, b1[:,:], f4[::1], f4[::1], u2[:,::1], u2[:,::1])"
)
def _gradients(s, dp, keys, factor, per_cap, first, hidden, lse, delta, p, ds) -> None:
    """Compute rounded probabilities and gradients of logits; all (keys, rows).

    There are as many rows as `lse` has; other rows and other keys get 0.  Capped logits times
    `per_cap` have the size of a hyperbolic tangent.  It is 0 without a cap.
    """
    m = len(lse)
    for x in (p, ds):
        x[keys:] = 0
        x[:, m:] = 0
    for key in range(keys):
        to = p[key, :m], ds[key, :m]
        _gradient_row(s[key, :m], dp[key, :m], factor, per_cap, lse, delta, *to)
        for row in range(len(hidden)):
            if hidden[row, key]:
                p[key, first + row] = ds[key, first + row] = 0


_NOTHING_HIDDEN = np.zeros((0, 0), bool)


class OneDnnKernel(NumbaKernel):
    """The kernel for bfloat16 on CPUs that have products for it.

    Small blocks, and blocks with NaN or infinite elements, are computed by the kernel "numba".
    """

    name = "onednn"

    def __init__(self, dtype: np.typing.DTypeLike, *given: Any, **options: Any) -> None:
        super().__init__(dtype, *given, **options)
        self.product_dtype = np.dtype(dtype)
        check_products()
        self._made: dict[tuple, tuple[Product, ...]] = {}

    def forward(self, q, k, v, intervals, out, lse, careful=False) -> None:
        """As of `NumpyKernel`."""
        (nq, nheads, d), (nk, nheads_kv, e) = q.shape, v.shape
        g = nheads // nheads_kv
        if careful or _is_small(nq * g, nk, d + e):
            super().forward(q, k, v, intervals, out, lse, careful)
            return
        blocks, most, masked_rows, masked_keys = self._blocker.blocking(intervals, nk, g)
        cap, scale = self.logit_softcap, _f(self.softmax_scale)
        factor = scale if cap is None else ONE
        room = (_whole_grains(most) * _whole_grains(min(nk, self._blocker.block_k)),)
        of_s, of_p = self._get("scores", room), self._get("p", room, _u16)
        for head in range(nheads_kv):
            heads = slice(head * g, (head + 1) * g)
            qh = self._of_head("q16", q[:, heads], masked_rows)  # (nq g, d)
            kh = self._of_head("k16", k[:, head, None], masked_keys)  # (nk, d)
            vh = self._of_head("v16", v[:, head, None], masked_keys)  # (nk, e)
            for i0, i1, cache_blocks in blocks:
                n = (i1 - i0) * g
                acc, statistics = self._zeros("acc", n, e), self._get("statistics", (3, n))
                total, shift = statistics[:2], statistics[2]
                total[:], shift[:] = 0, NONE
                places = map(_address, (qh[i0 * g :], kh, vh, acc, of_s, of_p))
                q_at, k_at, v_at, acc_at, s_at, p_at = places
                for block in cache_blocks:
                    rows, j0, b = block.rows, block.j0, block.j1 - block.j0
                    m, keys = _whole_grains(rows.stop - rows.start), _whole_grains(b)
                    s, p = (x[: m * keys].reshape(m, keys) for x in (of_s, of_p))
                    logits, sums = self._products(FORWARD, m, keys, d, e)
                    logits(q_at + 2 * d * rows.start, k_at + 2 * d * j0, s_at)
                    if cap is not None:
                        s *= scale
                        self._cap(s)
                    of_rows = shift[rows], total[:, rows], acc[rows]
                    _weights(s, b, factor, *_hidden(block), *of_rows, p)
                    sums(p_at, v_at + 2 * e * j0, acc_at + 4 * e * rows.start)
                    self.poll()
                _finish(acc[None, :n], *np.split(statistics, 3), lse[i0:i1, heads])
                out[i0:i1, heads] = acc[:n].reshape(-1, g, e)

    def backward(
        self, dout, q, k, v, lse, delta, intervals, dq, dk, dv, fresh=False, careful=False, **_
    ) -> None:
        """As of `NumpyKernel`."""
        (nq, nheads, d), (nk, nheads_kv, e) = q.shape, v.shape
        g = nheads // nheads_kv
        if careful or _is_small(nq * g, nk, d + e):
            given = dout, q, k, v, lse, delta, intervals, dq, dk, dv
            super().backward(*given, fresh, careful)
            return
        blocks, most, masked_rows, masked_keys = self._blocker.blocking(intervals, nk, g)
        cap, scale = self.logit_softcap, _f(self.softmax_scale)
        factors = (scale, ZERO) if cap is None else (ONE, _f(1 / cap))
        room = (_whole_grains(most) * _whole_grains(min(nk, self._blocker.block_k)),)
        of_s, of_dp = self._get("scores", room), self._get("dscores", room)
        of_p, of_ds = self._get("p", room, _u16), self._get("ds", room, _u16)
        for head in range(nheads_kv):
            heads = slice(head * g, (head + 1) * g)
            qh = self._of_head("q16", q[:, heads], masked_rows)  # (nq g, d)
            doh = self._of_head("dout16", dout[:, heads], masked_rows)  # (nq g, e)
            kh = self._of_head("k16", k[:, head, None], masked_keys)  # (nk, d)
            vh = self._of_head("v16", v[:, head, None], masked_keys)  # (nk, e)
            dkh, dvh = self._zeros("dk", nk, d), self._zeros("dv", nk, e)
            for i0, i1, cache_blocks in blocks:
                n = (i1 - i0) * g
                dqb, of_rows = self._zeros("dq", n, d), self._get("statistics", (2, i1 - i0, g))
                of_rows[0], of_rows[1] = lse[i0:i1, heads], delta[i0:i1, heads]
                if masked_rows is not None:
                    of_rows[:, masked_rows[i0:i1]] = 0
                of_rows = of_rows.reshape(2, n)
                q_at, do_at, dq_at = map(_address, (qh[i0 * g :], doh[i0 * g :], dqb))
                k_at, v_at, dk_at, dv_at = map(_address, (kh, vh, dkh, dvh))
                s_at, dp_at, p_at, ds_at = map(_address, (of_s, of_dp, of_p, of_ds))
                for block in cache_blocks:
                    rows, j0, b = block.rows, block.j0, block.j1 - block.j0
                    m, keys = _whole_grains(rows.stop - rows.start), _whole_grains(b)
                    arrays = (x[: m * keys].reshape(keys, m) for x in (of_s, of_dp, of_p, of_ds))
                    s, dp, p, ds = arrays
                    logits, slopes, to_v, to_k, to_q = self._products(BACKWARD, m, keys, d, e)
                    q_here, do_here = q_at + 2 * d * rows.start, do_at + 2 * e * rows.start
                    logits(k_at + 2 * d * j0, q_here, s_at)
                    slopes(v_at + 2 * e * j0, do_here, dp_at)
                    if cap is not None:
                        s *= scale
                        self._cap(s)
                    given = b, *factors, *_hidden(block), *of_rows[:, rows], p, ds
                    _gradients(s, dp, *given)
                    to_v(p_at, do_here, dv_at + 4 * e * j0)
                    to_k(ds_at, q_here, dk_at + 4 * d * j0)
                    to_q(ds_at, k_at + 2 * d * j0, dq_at + 4 * d * rows.start)
                    self.poll()
                dqb *= scale
                _put(dq[i0:i1, heads], dqb[:n].reshape(-1, g, d), fresh)
            dkh *= scale
            _put(dk[:, head], dkh[:nk], fresh)
            _put(dv[:, head], dvh[:nk], fresh)

    def _zeros(self, name: str, rows: int, d: int) -> Array:
        zeros = self._get(name, (rows + GRAIN, d))
        zeros[:] = 0
        return zeros

    def _of_head(self, name: str, x: Array, hide: Array | None) -> Array:
        """Copy (tokens, g, d) to the bits (tokens x g, d).

        Rows of tokens with true `hide` become 0.
        """
        tokens, g, d = x.shape
        packed = self._get(name, (tokens * g + GRAIN, d), _u16)
        by_token = packed[: tokens * g].reshape(x.shape)
        by_token[:], packed[tokens * g :] = x.view(_u16), 0
        if hide is not None:
            by_token[hide] = 0
        return packed

    def _products(self, equations: tuple[str, ...], *sizes: int) -> tuple[Product, ...]:
        """Return the products of a cache block of m rows and b keys, with widths d and e."""
        made = self._made.get((equations, sizes))
        if made is None:
            by_letter = dict(zip("mbde", sizes))
            made = tuple(Product(x, by_letter) for x in equations)
            self._made[equations, sizes] = made
        return made


def _address(x: Array) -> int:
    return x.__array_interface__["data"][0]


def _hidden(block: CacheBlock) -> tuple[int, Array]:
    return (0, _NOTHING_HIDDEN) if block.hidden is None else (block.differ.start, block.hidden)
