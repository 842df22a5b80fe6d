"""Layers of a transformer, forward and backward, on the rows of one rank.

Arrays are NumPy or CuPy arrays.  Their n rows are tokens.  A forward function returns its result
and the values that the backward function needs.  A backward function returns the gradient of the
input.  It adds the gradients of the parameters to `d`.  In the dicts `w` (parameters) and `d`
(gradients), a layer has the entries "{name}.weight" and "{name}.bias".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from a2d_mpi.devices.protocol import Array

Named = Mapping[str, Array]
EPSILON = 1e-5  # added to the variance in LayerNorm, as in GPT-2


def module_of(x: Array) -> Any:
    """Return the module of an array: NumPy or CuPy."""
    return np if isinstance(x, np.ndarray) else import_module("cupy")


def flat(x: Array) -> Array:
    """Return (n, H, D) as (n, H D); n may be 0."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def linear_backward(dy: Array, x: Array, w: Named, d: Named, name: str) -> Array:
    """Return the gradient of x, (n, E), for ``y = x @ weight + bias``; dy is (n, M)."""
    d[f"{name}.weight"] += x.T @ dy  # (E, M)
    d[f"{name}.bias"] += dy.sum(axis=0)  # (M,)
    return dy @ w[f"{name}.weight"].T  # (n, E)


def layer_norm(
    x: Array, w: Named, name: str, epsilon: float = EPSILON
) -> tuple[Array, tuple[Array, Array]]:
    """Apply LayerNorm to the rows of x, (n, E) (Ba et al., arXiv:1607.06450)."""
    centred = x - x.mean(axis=1, keepdims=True)
    spread = ((centred**2).mean(axis=1, keepdims=True) + epsilon) ** 0.5  # (n, 1)
    normal = centred / spread  # (n, E)
    return normal * w[f"{name}.weight"] + w[f"{name}.bias"], (normal, 1 / spread)


def layer_norm_backward(
    dy: Array, kept: tuple[Array, Array], w: Named, d: Named, name: str
) -> Array:
    """Return the gradient of LayerNorm's input, (n, E)."""
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
    # Not x**3: NumPy's powers take 35 to 50 times as long as products.
    return module_of(x).tanh(_ROOT * x * (1 + _CUBE * (x * x)))


def gelu(x: Array) -> Array:
    """Compute GELU by tanh (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return 0.5 * x * (1 + _inner_tanh(x))


def mlp(x: Array, w: Named) -> tuple[Array, Array]:
    """Compute the MLP of a layer without its last bias, (n, E), and its hidden layer, (n, M).

    If `w` has only some columns of ``fc`` and the same rows of ``out``, the result is one term of
    a sum over all columns.
    """
    hidden = x @ w["fc.weight"] + w["fc.bias"]  # (n, M)
    return gelu(hidden) @ w["out.weight"], hidden


def gelu_backward(dy: Array, x: Array) -> Array:
    """Return the gradient of GELU's input x."""
    tanh = _inner_tanh(x)
    slope = 0.5 * _ROOT * x * (1 - tanh * tanh) * (1 + 3 * _CUBE * (x * x))
    return dy * (0.5 * (1 + tanh) + slope)


def add_rows(total: Array, indices: Array, rows: Array) -> None:
    """Add row i of `rows`, (n, E), to row ``indices[i]`` of `total`, in the order of i."""
    if not len(rows):
        return
    xp = module_of(rows)
    order = xp.argsort(indices, kind="stable")
    ascending = indices[order]
    first = xp.flatnonzero(xp.concatenate([xp.ones(1, bool), ascending[1:] != ascending[:-1]]))
    total[ascending[first]] += xp.add.reduceat(rows[order], first, axis=0)


def cross_entropy(logits: Array, targets: Array) -> float:
    """Sum the cross-entropy of all rows, in nats; `logits` are overwritten by the gradient.

    Parameters
    ----------
    logits : (n, V)
        Overwritten by their gradient.
    targets : (n,) int64
        Target token of each row; -1: the row does not count.
    """
    xp = module_of(logits)
    rows = xp.flatnonzero(targets >= 0)
    wanted = targets[rows]
    logits -= logits.max(axis=1, keepdims=True)
    shifted = logits[rows, wanted]
    exp = xp.exp(logits, out=logits)
    total = exp.sum(axis=1, keepdims=True)
    # In float64, so that a mean over many tokens does not depend on their distribution.
    losses = xp.log(total[rows, 0]).astype(np.float64) - shifted
    exp *= (targets >= 0)[:, None].astype(exp.dtype) / total
    exp[rows, wanted] -= 1
    return float(losses.sum())
