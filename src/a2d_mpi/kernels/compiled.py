"""Passes over float32 arrays, compiled by Numba at the first import and then kept in a file.

``exp(x) = 2^n exp(r)`` with ``x = n ln(2) + r``, where n is the integer nearest to ``x / ln(2)``.
``exp(r)`` is computed by a polynomial of degree 6 with the constant term 1.  Among these
polynomials it has the least maximal relative error for ``|r| <= ln(2) / 2``, 2e-9.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.kernels.numpy import NumpyKernel

try:
    from numba import config, njit

    if config.DISABLE_JIT:
        raise ImportError("NUMBA_DISABLE_JIT is set")
except ImportError as error:
    raise ImportError(f"kernel 'numba' needs pip install a2d_mpi[numba]: {error}") from error

_f = np.float32
ZERO, ONE = _f(0), _f(1)
# Here n is -127 and 128: the exponents of 0 and of infinity.
LOWEST, HIGHEST = _f(-88.0), _f(88.7)
LN2, PER_LN2 = _f(0.6931471805599453), _f(1.4426950408889634)
# Adding x / ln(2) to ROUND rounds it to the integer n.  The last eight bits of the sum hold
# n + 127.
ROUND = _f((3 << 22) + 127)
C2, C3, C4, C5, C6 = map(
    _f, (0.49999994, 0.1666643, 0.041668005, 0.0083741955, 0.0013843607)
)  # fmt: skip


def _compile(signature: str, **options: object) -> Callable:
    """Return a decorator that compiles a function at once, or loads it from its file."""

    def compiled(function: Callable) -> Callable:
        try:
            return njit(signature, nogil=True, cache=True, **options)(function)
        except RuntimeError:  # Numba finds no folder for the file
            return njit(signature, nogil=True, **options)(function)

    return compiled


@njit(fastmath={"contract"})
def _exp(x: np.float32) -> np.float32:
    # These comparisons keep NaN; min and max may not.
    x = LOWEST if x < LOWEST else x
    x = HIGHEST if x > HIGHEST else x
    shifted = x * PER_LN2 + ROUND
    n = shifted - ROUND
    r = x - n * LN2
    p = (((((C6 * r + C5) * r + C4) * r + C3) * r + C2) * r + ONE) * r + ONE
    # 2^n: the last bits of `shifted` become the exponent of a float32.
    bits = np.float32(shifted).view(np.uint32) << np.uint32(23)
    return p * np.uint32(bits).view(np.float32)


# "reassoc" allows sums in any order, so that they are vectorized; `_exp` must not have it.
@_compile("void(f4[:,:,::1], f4[:,:], i8, b1[:,:])", fastmath={"reassoc"})
def _exponentials(s: Array, total: Array, first: int, hidden: Array) -> None:
    """Replace logits by exponentials; add their sums to `total` if it has rows.

    `hidden` has the pairs of the rows from `first` on.
    """
    heads, rows, keys = s.shape
    for head in range(heads):
        for row in range(rows):
            if first <= row < first + len(hidden):
                for i in range(keys):
                    s[head, row, i] = LOWEST if hidden[row - first, i] else s[head, row, i]
            # This loop must use one array only.  With two, LLVM would choose between two orders of
            # the sum by the addresses of the arrays, and results would not repeat bit for bit.
            row_sum = ZERO
            for i in range(keys):
                y = _exp(s[head, row, i])
                s[head, row, i] = y
                row_sum += y
            if total.shape[1]:
                total[head, row] += row_sum


@njit(fastmath={"reassoc"})
def _by_head(x: Array, hide: Array) -> Array:
    """Return the largest squared norm of each head; tokens with true `hide` do not count.

    If `hide` is empty, all tokens count.
    """
    largest = np.zeros(x.shape[1], np.float32)
    for token in range(x.shape[0]):
        if len(hide) and hide[token]:
            continue
        for head in range(x.shape[1]):
            norm = ZERO
            for i in range(x.shape[2]):
                norm += x[token, head, i] * x[token, head, i]
            largest[head] = max(largest[head], norm)
    return largest


@_compile("UniTuple(f4, 4)(f4[:,:,::1], f4[:,:,::1], f4[:,:,::1], b1[:], b1[:])")
def _largest_norms(q: Array, k: Array, v: Array, masked_rows: Array, masked_keys: Array) -> tuple:
    of_v = _by_head(v, masked_keys)
    return _by_head(q, masked_rows).max(), _by_head(k, masked_keys).max(), of_v.min(), of_v.max()


@_compile("void(f4[:,:,::1], f4[:,::1], f4[:,::1], f4[:,:], f4[:,:])")
def _finish(acc: Array, total: Array, weights: Array, shift: Array, lse: Array) -> None:
    """Divide `acc` by `weights` and write lse; an empty `shift`: nothing was subtracted.

    `weights` is `total`, or has the sums of rounded exponentials.
    """
    tokens, nheads = lse.shape
    group = nheads // len(acc)
    for token in range(tokens):
        for head in range(nheads):
            head_kv, row = head // group, token * group + head % group
            row_sum, weight = total[head_kv, row], weights[head_kv, row]
            factor = ZERO if weight == 0 else ONE / weight
            lse[token, head] = -np.inf if row_sum == 0 else math.log(row_sum)
            if shift.shape[1]:
                lse[token, head] += shift[head_kv, row]
            for i in range(acc.shape[2]):
                acc[head_kv, row, i] *= factor


# These arrays replace None, because functions are compiled for one type of each argument.
_NO_ROWS, _NOTHING_HIDDEN = np.zeros((0, 0), np.float32), np.zeros((0, 0), bool)
_NO_TOKEN = np.zeros(0, bool)


class NumbaKernel(NumpyKernel):
    """The NumPy kernel with passes over float32 arrays that Numba compiles.

    Exponentials have a relative error of 1e-7 from -10 to 10 (``np.exp``: 2e-7), and 3e-7 beyond.
    Below -87.7, where float32 has no normal numbers, they are 0.  Above 88.4 they are infinite.
    """

    def exponentials(self, s, total, differ, hidden) -> None:
        """As of `NumpyKernel`."""
        if total is None:
            total = _NO_ROWS
        if hidden is None:
            _exponentials(s, total, 0, _NOTHING_HIDDEN)
        else:
            _exponentials(s, total, differ.start, hidden)

    def largest_norms(
        self, q, k, v, masked_rows, masked_keys
    ) -> tuple[float, float, float, float]:
        """As of `NumpyKernel`."""
        # To Numba, 16-bit and read-only arrays have other types.
        if all(x.dtype == np.float32 and x.flags.carray for x in (q, k, v)):
            hide = (_NO_TOKEN if x is None else x for x in (masked_rows, masked_keys))
            return _largest_norms(q, k, v, *hide)
        return super().largest_norms(q, k, v, masked_rows, masked_keys)

    def finish(self, acc, total, shift, out, lse) -> None:
        """As of `NumpyKernel`."""
        _finish(acc, total, total, _NO_ROWS if shift is None else shift, lse)
        to = out.reshape(len(out), len(acc), -1, out.shape[2]).swapaxes(0, 1)
        to[:] = acc.reshape(to.shape)
