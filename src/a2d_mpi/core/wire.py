"""Narrow formats of tensors in messages: bfloat16, and two MX formats with scaled blocks.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6.3.  A block of 32
elements shares a scale, a power of two in a byte (E8M0).  Its exponent is the exponent of the
block's largest element minus the exponent of the format's largest element.  Elements are rounded
to the nearest value, ties to even, and clipped to the format's largest element.  A NaN or an
infinity makes its whole block NaN, by the scale 255.

A block lies inside one head of one token, whose last block may be shorter.  So heads can be
separated.  Encoding a decoded array again gives the same bytes, but for the elements of a block
that is NaN, which say nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

BLOCK = 32  # elements that share a scale
NAN = 255  # the scale of a block that is NaN
# Elements encoded at a time: they stay in the cache, which is 2 times faster than all at once.
_AT_ONCE = 1 << 14


class Format(NamedTuple):
    """A format of messages; its place in `FORMATS` is its number in kernels.cu.

    Attributes
    ----------
    bits : int
        Bits of an element.
    mantissa : int
        Bits of the mantissa.
    lowest, highest : int
        Exponents of the smallest normal element and of the largest element.
    largest : float
        The largest element.
    error : float
        Largest relative error of an element that is at least ``2 ** lowest`` times the scale.
    blocks : bool
        Whether blocks share a scale.
    """

    bits: int
    mantissa: int
    lowest: int
    highest: int
    largest: float
    error: float
    blocks: bool = True

    @property
    def floor(self) -> float:
        """Largest error of a smaller element, relative to the largest element of its block."""
        return self.blocks * 2.0 ** (self.lowest - self.mantissa - 1 - self.highest)

    def width(self, elements: int) -> int:
        """Return the bytes of one head of `elements` elements."""
        return -(-elements * self.bits // 8) + self.blocks * -(-elements // BLOCK)


FORMATS = {
    "bfloat16": Format(16, 7, -126, 127, (2 - 2**-7) * 2.0**127, 2**-8, blocks=False),
    "mxfp8": Format(8, 3, -6, 8, 448.0, 2**-3),  # E4M3; from 480 to 512 the error is up to 64
    "mxfp4": Format(4, 1, 0, 2, 6.0, 2**-2),  # E2M1; from 7 to 8 the error is up to 2
}
_CODES = {"mxfp8": ml_dtypes.float8_e4m3fn, "mxfp4": ml_dtypes.float4_e2m1fn}
_POWERS = np.ldexp(np.float32(1), np.arange(-127, 128))  # powers of two, from 2**-127 on
_SCALES = np.append(_POWERS, np.float32(np.nan))  # by the byte of a scale; 255 is NAN


def encode(to: np.ndarray, x: np.ndarray, name: str) -> None:
    """Encode an array.

    Parameters
    ----------
    to : (tokens, heads, bytes) uint8
        Receives the elements of each head, then the scales of its blocks: ``Format.width`` bytes.
    x : (tokens, heads, elements) float
        The array; it is rounded to float32 first.
    name : str
        One of `FORMATS`.
    """
    if name == "bfloat16":
        to.view(ml_dtypes.bfloat16)[...] = x
        return
    tokens = max(1, _AT_ONCE // max(1, x[:1].size))
    for i in range(0, len(x), tokens):
        _encode(to[i : i + tokens], x[i : i + tokens], name)


def _encode(to: np.ndarray, x: np.ndarray, name: str) -> None:
    form, elements, blocks = FORMATS[name], x.shape[2], -(-x.shape[2] // BLOCK)
    padded = np.zeros((*x.shape[:2], blocks * BLOCK), np.float32)
    padded[..., :elements] = x
    values = padded.reshape(*x.shape[:2], blocks, BLOCK)
    # With float32's bias of 127; 255 if an element is NaN or infinite.
    exponent = np.abs(values).max(axis=-1, keepdims=True).view(np.int32) >> 23
    scale = np.where(exponent == 255, NAN, np.maximum(exponent - form.highest, 0))
    values *= _POWERS[254 - np.minimum(scale, 254)]
    np.clip(values, -form.largest, form.largest, out=values)
    np.copyto(values, np.copysign(np.float32(0), values), where=scale == NAN)
    codes = padded.astype(_CODES[name]).view(np.uint8)
    if form.bits == 4:  # the first element of a pair is in the low half
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    to[..., :-blocks] = codes[..., : to.shape[2] - blocks]
    to[..., -blocks:] = scale[..., 0]


def decode(to: np.ndarray, x: np.ndarray, name: str) -> None:
    """Decode an array: the inverse of `encode`.

    Parameters
    ----------
    to : (tokens, heads, elements) float
        Receives the array.
    x : (tokens, heads, bytes) uint8
    name : str
        One of `FORMATS`.
    """
    if name == "bfloat16":
        to[...] = x.view(ml_dtypes.bfloat16)
        return
    elements, blocks = to.shape[2], -(-to.shape[2] // BLOCK)
    tokens = max(1, _AT_ONCE // max(1, to[:1].size))
    for i in range(0, len(x), tokens):
        encoded = x[i : i + tokens]
        values = np.zeros((*encoded.shape[:2], blocks * BLOCK), np.float32)
        codes = encoded[..., :-blocks]
        if FORMATS[name].bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)
        values[..., :elements] = codes.view(_CODES[name])[..., :elements]
        scaled = values.reshape(*encoded.shape[:2], blocks, BLOCK)
        scaled *= _SCALES[encoded[..., -blocks:]][..., None]
        to[i : i + tokens] = values[..., :elements]


def rounded(x: np.ndarray, wire: str) -> np.ndarray:
    """Round a tensor as `encode` and `decode` do, whose results are checked against this function.

    It is slow, computes in float64, and shares no code with them.

    Parameters
    ----------
    x : (tokens, heads, headdim) float
    wire : str
        One of `FORMATS`.

    Returns
    -------
    (tokens, heads, headdim), dtype of x
    """
    form, result = FORMATS[wire], np.empty_like(x)
    exact = x.astype(np.float32).astype(np.float64)
    for first in range(0, x.shape[2], BLOCK if form.blocks else x.shape[2]):
        block = exact[..., first : first + BLOCK] if form.blocks else exact  # (tokens, heads, 32)
        scale = 1.0
        if form.blocks:
            largest = np.abs(block).max(axis=-1, keepdims=True)
            exponent = np.frexp(largest)[1] - 1.0 - form.highest  # frexp's mantissa is below 1
            scale = np.exp2(np.maximum(exponent, -127))
            scale[~np.isfinite(largest)] = np.nan
        scaled = block / scale  # exact
        last_place = np.exp2(np.maximum(np.frexp(scaled)[1] - 1, form.lowest) - form.mantissa)
        scaled = np.rint(scaled / last_place) * last_place
        if form.blocks:
            scaled = np.clip(scaled, -form.largest, form.largest)
        result[..., first : first + scaled.shape[-1]] = scaled * scale
    return result
