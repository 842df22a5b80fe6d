"""Feature maps of queries and keys, and their gradients.

Arrays are head-major: x is (H, n, D), features are (H, n, F).
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.devices.protocol import Array

FEATURE_MAPS = ("none", "elu+1", "relu", "random")
ROTARY_BASE = 10000.0


class FeatureMap:
    """A map of each row, and its derivative.  This base class is the identity."""

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Compute the features y, (H, n, F), of rows x, (H, n, D)."""
        return x

    def backward(self, dy: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Compute the gradient of the rows, (H, n, D), from the gradient of the features y."""
        return dy


class EluPlusOne(FeatureMap):
    """ELU + 1: exp(x) for x <= 0, x + 1 for x > 0 (Katharopoulos et al., arXiv:2006.16236)."""

    def forward(self, x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def backward(self, dy: np.ndarray, y: np.ndarray) -> np.ndarray:
        return dy * np.minimum(y, 1)


class Relu(FeatureMap):
    """ReLU: max(x, 0)."""

    def forward(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0)

    def backward(self, dy: np.ndarray, y: np.ndarray) -> np.ndarray:
        return dy * (y > 0)


class RandomRotary(FeatureMap):
    """ReLU of random projections of rotated rows, as in MoLFormer (arXiv:2106.09553).

    The rows are rotated by the rotary angles of their tokens, see `rotate`.

    Parameters
    ----------
    tokens : (n,) int64
        Global index of each row.
    projections : (D, F) float
    dtype : dtype
        Dtype of the computation.
    """

    def __init__(self, tokens: np.ndarray, projections: np.ndarray, dtype: np.dtype) -> None:
        self._cos, self._sin = rotation(tokens, len(projections), dtype)
        self._projections, self._relu = projections.astype(dtype), Relu()

    def forward(self, x: np.ndarray) -> np.ndarray:
        return self._relu.forward(rotate(x, self._cos, self._sin) @ self._projections)

    def backward(self, dy: np.ndarray, y: np.ndarray) -> np.ndarray:
        dx = self._relu.backward(dy, y) @ self._projections.T
        return rotate(dx, self._cos, -self._sin)


def rotation(tokens: np.ndarray, headdim: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosine and sine, (n, D / 2), of the rotary angles of tokens, (n,).

    Source: Su et al., arXiv:2104.09864.
    """
    angles = tokens[:, None] * ROTARY_BASE ** (-2.0 * np.arange(headdim // 2) / headdim)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x, (..., D), in the planes of elements i and i + D / 2; -sin rotates back.

    x is a NumPy or CuPy array.
    """
    half, y = x.shape[-1] // 2, x.copy()
    first, second = x[..., :half], x[..., half:]
    y[..., :half], y[..., half:] = first * cos - second * sin, second * cos + first * sin
    return y


def random_projections(headdim: int, nfeatures: int, seed: int) -> np.ndarray:
    """Draw random directions that are orthogonal in groups of `headdim`.

    The lengths of the directions have the distribution of the lengths of normal vectors.  Source:
    Choromanski et al., arXiv:2009.14794.

    Returns
    -------
    (headdim, nfeatures) float64
        The same on all ranks.
    """
    rng, columns = np.random.default_rng(seed), []
    for _ in range(-(-nfeatures // headdim)):
        normal = rng.standard_normal((headdim, headdim))
        columns.append(np.linalg.qr(normal)[0] * np.linalg.norm(normal, axis=0))
    return np.concatenate(columns, axis=1)[:, :nfeatures]


def make_feature_map(
    name: str, tokens: np.ndarray, headdim: int, nfeatures: int, seed: int, dtype: np.dtype
) -> FeatureMap:
    """Make a feature map by its name, one of `FEATURE_MAPS`, for rows of the given tokens."""
    if name == "random":
        return RandomRotary(tokens, random_projections(headdim, nfeatures, seed), dtype)
    return {"none": FeatureMap, "elu+1": EluPlusOne, "relu": Relu}[name]()
