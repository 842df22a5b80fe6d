"""The 16-bit kernel for CPUs: products by oneDNN, and rows compiled by Numba.

Tensors are copied by head, because oneDNN multiplies contiguous rows fastest (bfloat16 on a Zen 4:
205 to 215 GFLOP/s, and 180 to 200 if the rows of a head lie apart).  Everything else stays in the
16 bits of the tensors, so no tensor is copied to float32:

* Forward, a product of queries and keys gives float32 logits.  One pass over a row makes rounded
  probabilities of them, and a second product adds these times the values to the row's sums.
* The shift of a row is its largest logit in the first cache block.  It is raised only if a later
  logit exceeds it by more than `SLACK`.
* Backward, logits are computed transposed (keys x queries), so that only one of five products
  reads a transposed matrix, and lse and delta are vectors that no row repeats.

In the comments on shapes, c is the number of KV heads that are packed at once, g the number of
query heads per KV head, n the number of rows of a query block (tokens x g), m of a cache block,
and b its number of keys.  d is headdim, and e is headdim_v.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from a2d_mpi.core.kernel_memory import GRAIN, whole_grains
from a2d_mpi.devices.protocol import Array
from a2d_mpi.kernels.blocks import CacheBlock
from a2d_mpi.kernels.compiled import NumbaKernel, _compile, njit
from a2d_mpi.kernels.numpy import _put
from a2d_mpi.kernels.onednn_calls import Product, check_products, open_library

_f, _u = np.float32, np.uint32
ZERO, ONE, NONE = _f(0), _f(1), _f(-np.inf)
FEWEST = GRAIN  # rows and keys of a block; smaller blocks are computed by the kernel "numba"
SLACK = _f(14)  # binary orders; 2^14 is still a float16
# 2^-127 has the exponent of 0, and 2^128 of infinity.
LOWEST, HIGHEST = _f(-127), _f(128)
# As in `compiled`: the last eight bits of x + ROUND hold n + 127; n is the integer nearest to
# x.  The polynomial has the least maximal relative error, 1e-7.
ROUND = _f((3 << 22) + 127)
C1, C2, C3, C4, C5 = map(_f, (0.69314698, 0.24022242, 0.05550734, 0.00967151, 0.00132647))
LN2, PER_LN2 = _f(math.log(2)), _f(1 / math.log(2))
SIGN = np.int32(0x7FFFFFFF)


@njit(fastmath={"contract"})
def _exp2(x: np.float32) -> np.float32:
    x = LOWEST if x < LOWEST else x
    shifted = x + ROUND
    r = x - (shifted - ROUND)
    p = ((((C5 * r + C4) * r + C3) * r + C2) * r + C1) * r + ONE
    return p * _u(_f(shifted).view(_u) << _u(23)).view(_f)


@njit
def _rounded(x: np.float32) -> np.uint16:
    """Return the bits of the nearest bfloat16."""
    return np.uint16(_u(_f(x).view(_u) + _u(0x8000)) >> _u(16))


# Integers find the largest number, because LLVM does not vectorize a maximum that keeps NaN.
@njit
def _ordered(x: np.int32) -> np.int32:
    """Map the bits of a float32 to an integer of the same order, and back."""
    return np.int32(x ^ ((x >> np.int32(31)) & SIGN))


@njit
def _largest(s: Array, factor: np.float32) -> np.float32:
    top = np.int32(-SIGN)
    for j in range(len(s)):
        top = max(top, _ordered(_f(s[j] * factor).view(np.int32)))
    return np.int32(_ordered(np.int32(top))).view(_f)


@njit(fastmath={"contract", "reassoc"})
def _powers(s: Array, factor: np.float32, shift: np.float32, p: Array) -> tuple:
    """Write rounded powers of two to `p`.

    Return the largest exponent, if it is positive, and the sums of the powers before and after
    rounding.
    """
    top, exact, rounded = np.int32(-SIGN), ZERO, ZERO
    for j in range(len(s)):
        x = _f(s[j] * factor - shift)
        top = max(top, x.view(np.int32))
        y = _exp2(x)
        exact += y
        p[j] = _rounded(y)
        rounded += _u(_u(p[j]) << _u(16)).view(_f)
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
        if new != old:
            shift[row] = new
            if old != NONE:
                shrink = _f(2) ** (old - new)
                total[:, row] *= shrink
                for j in range(acc.shape[1]):
                    acc[row, j] *= shrink
        if not top <= SLACK:  # it is infinite or NaN
            exact = top
        total[0, row] += exact
        total[1, row] += rounded


@_compile("void(f4[:,::1], f4[:,:], f4[::1], f4[:,:])")
def _finish(acc: Array, total: Array, shift: Array, lse: Array) -> None:
    """Divide `acc` by the sums of rounded weights; write lse, (tokens, g), with the exact ones."""
    group = lse.shape[1]
    for row in range(len(acc)):
        exact, rounded = total[0, row], total[1, row]
        factor = ZERO if rounded == ZERO else ONE / rounded
        for i in range(acc.shape[1]):
            acc[row, i] *= factor
        nats = NONE if exact == ZERO else LN2 * (shift[row] + PER_LN2 * math.log(exact))
        lse[row // group, row % group] = nats


@_compile("void(f4[:,:,:], u2[:,:,:])")
def _narrow(x: Array, to: Array) -> None:
    """Round numbers to bfloat16, to even if two are equally near."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            for n in range(x.shape[2]):
                bits = _f(x[i, j, n]).view(_u)
                odd = _u(_u(bits >> _u(16)) & _u(1))
                to[i, j, n] = np.uint16(_u(_u(bits + _u(0x7FFF)) + odd) >> _u(16))


@njit(fastmath={"contract"})
def _gradient_row(s, dp, factor, per_cap, lse, delta, p, ds) -> None:
    for i in range(len(s)):
        x = s[i] * factor - lse[i]
        weight = _exp2(HIGHEST if x > HIGHEST else x)
        tanh = s[i] * per_cap
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
        check_products(self.product_dtype.name)
        self.version = open_library().version
        self._products: dict[tuple, Product] = {}

    def forward(self, q, k, v, intervals, out, lse, careful=False, largest=None) -> None:
        """As of `NumpyKernel`."""
        nheads, d = q.shape[1:]
        nk, nheads_kv, e = v.shape
        g = nheads // nheads_kv
        if careful or self._small(len(q) * g, nk):
            super().forward(q, k, v, intervals, out, lse, careful, largest)
            return
        blocks, most, masked_rows, masked_keys = self._blocker.blocking(intervals, nk, g)
        scaled = largest is not None or self.logit_softcap is not None
        factor = _f((1 if scaled else self.softmax_scale) / math.log(2))
        s_at, p_at = self._scratch(most, nk, ("scores", np.float32), ("p", np.uint16))
        for group in self._groups(nheads_kv, len(q) * g, nk, max(d, e)):
            c, heads_kv = len(group), slice(group.start, group.stop)
            qh = self._by_head("q16", q[:, group.start * g : group.stop * g], c, masked_rows)
            kh = self._by_head("k16", k[:, heads_kv], c, masked_keys)  # (c, nk, d)
            vh = self._by_head("v16", v[:, heads_kv], c, masked_keys)  # (c, nk, e)
            for i in range(c):
                heads = slice((group.start + i) * g, (group.start + i + 1) * g)
                q_at, k_at, v_at = _address(qh[i]), _address(kh[i]), _address(vh[i])
                for i0, i1, cache_blocks in blocks:
                    n = (i1 - i0) * g
                    acc, total = (
                        self._get("acc", (whole_grains(n), e)),
                        self._get("statistics", (3, n)),
                    )
                    total, shift = total[:2], total[2]
                    acc[:], total[:], shift[:] = 0, 0, NONE
                    acc_at = _address(acc)
                    for block in cache_blocks:
                        rows, b = block.rows, block.j1 - block.j0
                        size = m, keys = whole_grains(rows.stop - rows.start), whole_grains(b)
                        s, p = self._get("scores", size), self._get16("p", size)
                        # (m, b) = (m, d) @ (d, b)
                        to = q_at + 2 * d * (i0 * g + rows.start), k_at + 2 * d * block.j0
                        self._multiply((m, d, keys), (d, 1), (1, d))(*to, s_at)
                        if scaled:
                            s *= _f(self.softmax_scale)
                            if largest is not None:
                                seen = s[: rows.stop - rows.start, :b]
                                self._find_largest(seen[None], None, block, largest[heads])
                            if self.logit_softcap is not None:
                                self._cap(s)
                        _weights(
                            s, b, factor, *_hidden(block), shift[rows], total[:, rows],
                            acc[rows], p,
                        )  # fmt: skip
                        # (m, e) += (m, b) @ (b, e)
                        to = v_at + 2 * e * block.j0, acc_at + 4 * e * rows.start
                        self._multiply((m, keys, e), (keys, 1), (e, 1), True)(p_at, *to)
                        self.poll()
                    _finish(acc[:n], total, shift, lse[i0:i1, heads])
                    _write(out[i0:i1, heads], acc[:n], True)

    def backward(
        self, dout, q, k, v, lse, delta, intervals, dq, dk, dv, fresh=False, careful=False, **_
    ) -> None:
        """As of `NumpyKernel`."""
        nheads, d = q.shape[1:]
        nk, nheads_kv, e = v.shape
        g = nheads // nheads_kv
        if careful or self._small(len(q) * g, nk):
            given = dout, q, k, v, lse, delta, intervals, dq, dk, dv
            super().backward(*given, fresh, careful)
            return
        blocks, most, masked_rows, masked_keys = self._blocker.blocking(intervals, nk, g)
        cap = self.logit_softcap
        factor = _f((self.softmax_scale if cap is None else 1) / math.log(2))
        per_cap = _f(0 if cap is None else 1 / cap)
        wide, narrow = ("scores", "dscores"), ("p", "ds")
        kinds = *((x, np.float32) for x in wide), *((x, np.uint16) for x in narrow)
        s_at, dp_at, p_at, ds_at = self._scratch(most, nk, *kinds)
        for group in self._groups(nheads_kv, len(q) * g, nk, max(d, e)):
            c, heads_kv = len(group), slice(group.start, group.stop)
            of_group = slice(group.start * g, group.stop * g)
            qh = self._by_head("q16", q[:, of_group], c, masked_rows)  # (c, nq g, d)
            doh = self._by_head("dout16", dout[:, of_group], c, masked_rows)  # (c, nq g, e)
            kh = self._by_head("k16", k[:, heads_kv], c, masked_keys)  # (c, nk, d)
            vh = self._by_head("v16", v[:, heads_kv], c, masked_keys)  # (c, nk, e)
            dkh, dvh = self._padded("dk", (c, nk, d)), self._padded("dv", (c, nk, e))
            dkh[:] = dvh[:] = 0
            for i in range(c):
                heads = slice((group.start + i) * g, (group.start + i + 1) * g)
                q_at, k_at, v_at, do_at = map(_address, (qh[i], kh[i], vh[i], doh[i]))
                dk_at, dv_at = _address(dkh[i]), _address(dvh[i])
                for i0, i1, cache_blocks in blocks:
                    n = (i1 - i0) * g
                    dqb, both = (
                        self._get("dq", (whole_grains(n), d)),
                        self._get("statistics", (2, i1 - i0, g)),
                    )
                    dqb[:] = 0
                    np.multiply(lse[i0:i1, heads], PER_LN2, out=both[0])
                    both[1] = delta[i0:i1, heads]
                    if masked_rows is not None:
                        both[:, masked_rows[i0:i1]] = 0
                    both, dq_at = both.reshape(2, n), _address(dqb)
                    for block in cache_blocks:
                        rows, b, j0 = block.rows, block.j1 - block.j0, block.j0
                        size = keys, m = whole_grains(b), whole_grains(rows.stop - rows.start)
                        first = i0 * g + rows.start
                        s, dp = self._get("scores", size), self._get("dscores", size)
                        p, ds = self._get16("p", size), self._get16("ds", size)
                        k_here, v_here = k_at + 2 * d * j0, v_at + 2 * e * j0
                        q_here, do_here = q_at + 2 * d * first, do_at + 2 * e * first
                        # (b, m) = (b, d) @ (d, m)
                        self._multiply((keys, d, m), (d, 1), (1, d))(k_here, q_here, s_at)
                        self._multiply((keys, e, m), (e, 1), (1, e))(v_here, do_here, dp_at)
                        if cap is not None:
                            s *= _f(self.softmax_scale)
                            self._cap(s)
                        _gradients(
                            s, dp, b, factor, per_cap, *_hidden(block), *both[:, rows], p, ds
                        )  # fmt: skip
                        # (b, e) += (b, m) @ (m, e)
                        to = dv_at + 4 * e * j0
                        self._multiply((keys, m, e), (m, 1), (e, 1), True)(p_at, do_here, to)
                        to = dk_at + 4 * d * j0
                        self._multiply((keys, m, d), (m, 1), (d, 1), True)(ds_at, q_here, to)
                        # (m, d) += (m, b) @ (b, d)
                        to = dq_at + 4 * d * rows.start
                        self._multiply((m, keys, d), (1, m), (d, 1), True)(ds_at, k_here, to)
                        self.poll()
                    dqb *= _f(self.softmax_scale)
                    _write(dq[i0:i1, heads], dqb[:n], fresh)
            dkh *= _f(self.softmax_scale)
            _write(dk[:, heads_kv].swapaxes(0, 1), dkh, fresh)
            _write(dv[:, heads_kv].swapaxes(0, 1), dvh, fresh)

    def _small(self, rows: int, keys: int) -> bool:
        return min(rows, keys) < FEWEST

    def _scratch(self, rows: int, keys: int, *kinds: tuple[str, type]) -> list[int]:
        """Return addresses of buffers that hold an array of any cache block."""
        size = (whole_grains(rows) * whole_grains(min(keys, self._blocker.block_k)),)
        return [_address(self._work.get(("kernel", x), size, np.dtype(y))) for x, y in kinds]

    def _padded(self, name: str, shape: tuple[int, ...], dtype: type = np.float32) -> Array:
        """Return an array with `GRAIN` rows of zeros behind it, which products may read."""
        size, behind = math.prod(shape), GRAIN * shape[-1]
        padded = self._work.get(("kernel", name), (size + behind,), np.dtype(dtype))
        padded[size:] = 0
        return padded[:size].reshape(shape)

    def _get16(self, name: str, shape: tuple[int, ...]) -> Array:
        return self._work.get(("kernel", name), shape, np.dtype(np.uint16))

    def _by_head(self, name: str, x: Array, heads_kv: int, hide: Array | None) -> Array:
        """Copy (tokens, heads, d) to the bits (heads_kv, tokens x group, d).

        Rows of tokens with true `hide` become 0.
        """
        tokens, heads, d = x.shape
        shape = heads_kv, tokens, heads // heads_kv, d
        packed = self._padded(name, shape, np.uint16)
        packed[:] = x.view(np.uint16).reshape(tokens, heads_kv, -1, d).swapaxes(0, 1)
        if hide is not None:
            packed[:, hide] = 0
        return packed.reshape(heads_kv, -1, d)

    def _multiply(self, sizes, strides_a, strides_b, add=False) -> Product:
        key = sizes, strides_a, strides_b, add
        if (product := self._products.get(key)) is None:
            product = self._products[key] = Product(self.product_dtype.name, *key)
        return product


def _address(x: Array) -> int:
    return x.__array_interface__["data"][0]


def _write(to: Array, x: Array, fresh: bool) -> None:
    """Add float32 numbers to an array, or overwrite it, which may then be of 16 bits."""
    x = x.reshape(to.shape)
    if fresh and to.dtype.itemsize == 2:
        _narrow(x, to.view(np.uint16))
    else:
        _put(to, x, fresh)


def _hidden(block: CacheBlock) -> tuple[int, Array]:
    return (0, _NOTHING_HIDDEN) if block.hidden is None else (block.differ.start, block.hidden)
