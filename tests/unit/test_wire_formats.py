"""Narrow formats on the wire: codes against OCP's definition."""

import math

import ml_dtypes
import numpy as np
import pytest
from helpers import deeper

from a2d_mpi import Full
from a2d_mpi.core import wire
from a2d_mpi.core.config import WIRES, AttentionConfig
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.layout import Layout
from a2d_mpi.core.wire import FORMATS, decode, encode
from a2d_mpi.schedules.steps import Decode, Encode
from a2d_mpi.schedules.writing import problem_of, write

MX = {"mxfp8": ml_dtypes.float8_e4m3fn, "mxfp4": ml_dtypes.float4_e2m1fn}


def test_names():
    assert tuple(FORMATS) == WIRES


def block_of(x, name):
    """Return scale and codes of a block by OCP's specification (sections 5.3 and 6.3)."""
    if not np.isfinite(x).all():
        return 255, [0] * len(x)
    largest, most, scale = np.abs(x).max(), float(ml_dtypes.finfo(MX[name]).max), -127
    if largest:
        scale = max(math.frexp(largest)[1] - math.frexp(most)[1], -127)
    held = np.clip(np.ldexp(x, -scale), -most, most).astype(MX[name])
    return scale + 127, held.view(np.uint8).tolist()


def numbers(rng, tokens, heads, headdim, dtype="float32"):
    """Return numbers of all sizes, with ties, zeros of both signs and saturation."""
    x = rng.standard_normal((tokens, heads, headdim)) * 2.0 ** rng.integers(
        -12, 12, (tokens, 1, 1)
    )
    x[0::5] = rng.choice([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 7.0], x[0::5].shape)
    x[1::5] *= rng.random(x[1::5].shape) < 0.1
    return x.astype(DTYPES[dtype])


def codes_of(bytes_, headdim, name):
    """Return codes and scales in the bytes of one head."""
    blocks = -(-headdim // 32)
    codes = bytes_[:-blocks]
    if name == "mxfp4":
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)
    return codes[:headdim].tolist(), bytes_[-blocks:].tolist()


def encoded(x, name):
    to = np.empty((*x.shape[:2], FORMATS[name].width(x.shape[2])), np.uint8)
    encode(to, x, name)
    return to


def decoded(bytes_, like, name):
    to = np.empty_like(like)
    decode(to, bytes_, name)
    return to


@pytest.mark.parametrize("name", MX)
def test_all_codes(name):
    """Every code is decoded as its table says, under three scales, and encoded back."""
    bits = FORMATS[name].bits
    codes = np.arange(1 << bits, dtype=np.uint8)
    held = codes if bits == 8 else codes[::2] | codes[1::2] << 4
    for scale in (0, 127, 200):
        blocks = -(-len(codes) // 32)
        bytes_ = np.concatenate([held, np.full(blocks, scale, np.uint8)])[None, None]
        found = decoded(bytes_, np.empty((1, 1, len(codes)), np.float32), name)[0, 0]
        exact = codes.view(MX[name]).astype(float) * 2.0 ** (scale - 127)
        np.testing.assert_array_equal(found, exact.astype(np.float32))
    bytes_[..., -blocks:] = 255
    assert np.isnan(decoded(bytes_, np.empty((1, 1, len(codes)), np.float32), name)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("headdim", [1, 5, 32, 33, 80])
@pytest.mark.parametrize("name", MX)
def test_scales_and_codes(name, headdim, dtype):
    """Scales and codes are the reference's; blocks begin with each head; the last is shorter."""
    x = numbers(np.random.default_rng(headdim), 10, 2, headdim, dtype)
    if headdim == 33:
        x[3, 0, 0], x[4, 1, 32], x[6, 1, 5] = np.nan, np.inf, -np.inf
    found = encoded(x, name)
    for row, bytes_ in zip(x.reshape(-1, headdim), found.reshape(-1, found.shape[2])):
        codes, scales = codes_of(bytes_, headdim, name)
        for i in range(0, headdim, 32):
            scale, right = block_of(row[i : i + 32].astype(np.float32).astype(float), name)
            assert scales[i // 32] == scale
            if scale < 255:
                assert codes[i : i + 32] == right


@pytest.mark.parametrize("name", FORMATS)
def test_ways_and_back(name):
    """Decoded numbers encode to the same bytes, head by head, too."""
    rng = np.random.default_rng(0)
    for dtype, headdim in (("float32", 64), ("float32", 7), ("float64", 33), ("float16", 48)):
        x = numbers(rng, 300, 3, headdim, dtype)
        x[7, 1, headdim // 2] = np.nan
        if dtype != "float16":
            x[8], x[9] = x[8] * 1e-38, x[9] * (3e38 / np.abs(x[9]).max())
            x[10] *= 1e-44 / np.abs(x[10]).max()
        first = encoded(x, name)
        y = decoded(first, x, name)
        np.testing.assert_array_equal(encoded(y, name)[:7], first[:7])
        np.testing.assert_array_equal(decoded(encoded(y, name), x, name), y)
        np.testing.assert_array_equal(encoded(x[:, 1:], name), first[:, 1:])
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(y, wire.rounded(x, name))
            form, size = FORMATS[name], np.abs(x.astype(float))
            bound = np.maximum(form.error * size, form.floor * size.max(-1, keepdims=True))
            tiny = 1e-40 + form.floor * 2.0 ** (form.highest - 127)  # the smallest scale is 2^-127
            off = np.abs(y.astype(float) - x) > bound + tiny
        assert not off.any()
    rounded = decoded(
        encoded(np.full((1, 1, 40), np.inf, np.float32), name), np.empty((1, 1, 40)), name
    )
    assert (np.isinf if name == "bfloat16" else np.isnan)(rounded).all()


def test_elements_of_a_nan_block():
    """They say nothing, so a decoded block may encode to others, as docs/wire.md says."""
    x = np.array([[[-1, np.nan]]], np.float32)
    first = encoded(x, "mxfp8")
    again = encoded(decoded(first, x, "mxfp8"), "mxfp8")
    assert (first.tolist(), again.tolist()) == ([[[128, 0, 255]]], [[[0, 0, 255]]])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", deeper(DTYPES, ["float32"]))
def test_the_same_bytes_on_a_gpu(cupy, dtype, name):
    from a2d_mpi.devices.cuda import Cuda

    device, rng = Cuda.current(), np.random.default_rng(0)
    for headdim in (1, 2, 31, 64, 70):
        x = numbers(rng, 9, 2, headdim, dtype)
        x[4, 1, 0], x[5, 0, headdim - 1] = np.inf, np.nan
        right = encoded(x, name)
        to = device.upload(np.full(right.shape, 77, np.uint8))
        device.encode(to, device.upload(x), name)
        if name != "bfloat16":  # which has many NaNs
            np.testing.assert_array_equal(device.download(to), right)
        back = device.empty(x.shape, x.dtype)
        device.decode(back, device.upload(right), name)
        both = device.download(back), decoded(right, x, name)
        np.testing.assert_array_equal(*(y.astype(float) for y in both))


@pytest.mark.parametrize(("name", "encodings"), [(None, 0), ("mxfp8", 1)])
def test_what_is_passed_on_is_encoded_once(name, encodings):
    """A ring encodes its own keys and values; others' it passes on as they came, and decodes."""
    layout, config = Layout(1, 4, 1), AttentionConfig(64, 2, 64, wire=name)
    problem = problem_of("ring", layout, config, Full())
    (program,) = write("ring", "forward", layout, problem, 1)
    kinds = [type(step) for step in program.steps]
    assert kinds.count(Encode) == encodings and kinds.count(Decode) == 3 * encodings


def test_bounds_of_the_format():
    """Merges times the error of the format times the largest term is added, however large."""
    from a2d_mpi.checks.check import error_bounds

    norms, largest = {"q": 1.0, "k": 1.0, "v": 1.0}, {"out": 2.0, "lse": 1.0}
    same = dict.fromkeys(largest, 1e-6)
    given = np.dtype("f4"), 1.0, norms, largest, same
    plain, wide = error_bounds(*given), error_bounds(*given, {"out": 0.25 * 3})
    assert wide == {"lse": plain["lse"], "out": pytest.approx(plain["out"] + 0.25 * 3 * 2.0)}
