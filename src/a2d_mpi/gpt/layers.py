"""Layers of a transformer, forward and backward, on the rows of one rank.

Arrays are NumPy's or CuPy's.  Rows are tokens; there are n.  A forward function returns its result
and what the backward function needs.  A backward function returns the gradient of the input and
adds the gradients of the parameters to theirs.  The parameters `w` of a layer and their gradients
`d` are the entries "{name}.weight" and "{name}.bias".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from a2d_mpi.devices.protocol import Array

Named = Mapping[str, Array]
EPSILON = 1e-5  # of LayerNorm, as GPT-2
ROTARY_BASE = 10000.0


def module_of(x: Array) -> Any:
    """NumPy, or CuPy for its arrays."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy


def flat(x: Array) -> Array:
    """Rows of one dimension, (n, H D) of (n, H, D); there may be none."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def linear_backward(dy: Array, x: Array, w: Named, d: Named, name: str) -> Array:
    """Gradient of x in ``y = x @ weight + bias``: x (n, E), weight (E, M), dy (n, M)."""
    d[f"{name}.weight"] += x.T @ dy  # (E, M)
    d[f"{name}.bias"] += dy.sum(axis=0)  # (M,)
    return dy @ w[f"{name}.weight"].T  # (n, E)


def layer_norm(
    x: Array, w: Named, name: str, epsilon: float = EPSILON
) -> tuple[Array, tuple[Array, Array]]:
    """LayerNorm of rows (Ba et al., arXiv:1607.06450), x (n, E)."""
    centred = x - x.mean(axis=1, keepdims=True)
    spread = ((centred**2).mean(axis=1, keepdims=True) + epsilon) ** 0.5  # (n, 1)
    normal = centred / spread  # (n, E)
    return normal * w[f"{name}.weight"] + w[f"{name}.bias"], (normal, 1 / spread)


def layer_norm_backward(
    dy: Array, kept: tuple[Array, Array], w: Named, d: Named, name: str
) -> Array:
    """Gradient of the rows, (n, E)."""
    normal, rstd = kept
    d[f"{name}.weight"] += (dy * normal).sum(axis=0)
    d[f"{name}.bias"] += dy.sum(axis=0)
    dnormal = dy * w[f"{name}.weight"]
    mean = dnormal.mean(axis=1, keepdims=True)
    along = (dnormal * normal).mean(axis=1, keepdims=True)
    return rstd * (dnormal - mean - normal * along)


_ROOT = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def _inner_tanh(x: Array) -> Array:
    # Not x**3: NumPy's powers are 35 to 50 times as slow as products.
    return module_of(x).tanh(_ROOT * x * (1 + _CUBE * (x * x)))


def gelu(x: Array) -> Array:
    """GELU by tanh (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return 0.5 * x * (1 + _inner_tanh(x))


def mlp(x: Array, w: Named) -> tuple[Array, Array]:
    """The MLP of a block without its last bias, (n, E), and what its backward pass needs.

    With some columns of ``fc`` and the same rows of ``out``: a part of a sum.
    """
    hidden = x @ w["fc.weight"] + w["fc.bias"]  # (n, M)
    return gelu(hidden) @ w["out.weight"], hidden


def gelu_backward(dy: Array, x: Array) -> Array:
    """Gradient of x."""
    tanh = _inner_tanh(x)
    slope = 0.5 * _ROOT * x * (1 - tanh * tanh) * (1 + 3 * _CUBE * (x * x))
    return dy * (0.5 * (1 + tanh) + slope)


def add_rows(total: Array, indices: Array, rows: Array) -> None:
    """Add each row of (n, E) to the row of `total` that its index says, in the order of rows."""
    if not len(rows):
        return
    xp = module_of(rows)
    order = xp.argsort(indices, kind="stable")
    ascending = indices[order]
    first = xp.flatnonzero(xp.concatenate([xp.ones(1, bool), ascending[1:] != ascending[:-1]]))
    total[ascending[first]] += xp.add.reduceat(rows[order], first, axis=0)


def rotation(positions: Array, headdim: int, dtype: np.dtype) -> tuple[Array, Array]:
    """Cosine and sine, (n, 1, D / 2), of the angles by which heads at positions are rotated."""
    xp = module_of(positions)
    rates = ROTARY_BASE ** (-2.0 * xp.arange(headdim // 2) / headdim)
    angles = positions[:, None, None] * rates
    return xp.cos(angles).astype(dtype), xp.sin(angles).astype(dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x, (n, H, D): element i of a head with element i + D / 2.  By -sin: back."""
    half = x.shape[2] // 2
    first, second = x[..., :half], x[..., half:]
    parts = first * cos - second * sin, second * cos + first * sin
    return module_of(x).concatenate(parts, axis=2)


def cross_entropy(logits: Array, targets: Array) -> float:
    """Sum of the losses of rows, in nats; the logits become its gradient.

    Parameters
    ----------
    logits : (n, V)
        Overwritten.
    targets : (n,) int64
        Token of each row; rows with -1 count nothing.
    """
    xp = module_of(logits)
    rows = xp.flatnonzero(targets >= 0)
    wanted = targets[rows]
    logits -= logits.max(axis=1, keepdims=True)
    shifted = logits[rows, wanted]
    exp = xp.exp(logits, out=logits)
    total = exp.sum(axis=1, keepdims=True)
    # In float64: a mean over many tokens should not depend on how they are shared out.
    losses = xp.log(total[rows, 0]).astype(np.float64) - shifted
    exp *= (targets >= 0)[:, None].astype(exp.dtype) / total
    exp[rows, wanted] -= 1
    return float(losses.sum())
