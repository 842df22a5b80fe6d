"""Feature maps of queries and keys, normalisations of the output, and their gradients.

Arrays of feature maps are head-major: x is (H, n, D), features are (H, n, F).  Arrays of
normalisations are token-major: sums are (n, H, D), or (n, H, D + 1) if the last column is the
denominator.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from a2d_mpi.devices.protocol import Array

FEATURE_MAPS = ("none", "elu+1", "relu", "random")
ROTARY_BASE = 10000.0
# Added to a denominator or a mean square; 1e-6 as in the code of Katharopoulos et al.
EPSILON = 1e-6
Map = Callable[..., np.ndarray]


# Maps of each element: the features of x, and the gradient of x from that of the features y.
_ELEMENTWISE = {
    "none": (lambda x: x, lambda dy, y: dy),
    # Katharopoulos et al., arXiv:2006.16236
    "elu+1": (
        lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        lambda dy, y: dy * np.minimum(y, 1),
    ),
    "relu": (lambda x: np.maximum(x, 0), lambda dy, y: dy * (y > 0)),
}


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
) -> tuple[Map, Map]:
    """Make a feature map by its name, one of `FEATURE_MAPS`, for rows of the given tokens.

    The rows of "random" are rotated by the rotary angles of their tokens, see `rotate`; their
    features are the ReLU of random projections, as in MoLFormer (arXiv:2106.09553).

    Returns
    -------
    forward : callable
        ``forward(x)`` computes the features y, (H, n, F), of rows x, (H, n, D).
    backward : callable
        ``backward(dy, y)`` computes the gradient of the rows from that of the features.
    """
    if name != "random":
        return _ELEMENTWISE[name]
    cos, sin = rotation(tokens, headdim, dtype)
    projections = random_projections(headdim, nfeatures, seed).astype(dtype)  # (D, F)
    relu, relu_backward = _ELEMENTWISE["relu"]
    return (
        lambda x: relu(rotate(x, cos, sin) @ projections),
        lambda dy, y: rotate(relu_backward(dy, y) @ projections.T, cos, -sin),
    )


class Norm:
    """A normalisation of sums.  This base class is the identity.

    Attributes
    ----------
    columns : int
        Columns of ones that are appended to the values: 1 for a denominator, else 0.
    """

    columns = 0

    def forward(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Compute out, (n, H, D), and the scale of each row, which `backward` needs."""
        return sums, None

    def backward(self, dout: np.ndarray, out: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        """Compute the gradient of the sums."""
        return dout


class Denominator(Norm):
    """Division by the sum of the weights (Katharopoulos et al., arXiv:2006.16236)."""

    columns = 1

    def forward(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = 1 / (sums[..., -1:] + sums.dtype.type(EPSILON))  # (n, H, 1)
        return sums[..., :-1] * scale, scale

    def backward(self, dout: np.ndarray, out: np.ndarray, scale: np.ndarray) -> np.ndarray:
        along = (dout * out).sum(axis=2, keepdims=True)  # (n, H, 1)
        return np.concatenate([dout, -along], axis=2) * scale


class OutputNorm(Norm):
    """Division by the root mean square of all heads of a token (TransNormer, arXiv:2307.14995)."""

    def forward(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # In float32 the square of 2e19 overflows: the scale would be 0, and out wrong.
        square = np.square(sums, dtype=np.float64).mean(axis=(1, 2), keepdims=True)  # (n, 1, 1)
        scale = (1 / np.sqrt(square + EPSILON)).astype(sums.dtype)
        return sums * scale, scale

    def backward(self, dout: np.ndarray, out: np.ndarray, scale: np.ndarray) -> np.ndarray:
        along = (dout * out).mean(axis=(1, 2), keepdims=True)  # (n, 1, 1)
        return (dout - out * along) * scale


NORMS = {"none": Norm(), "denominator": Denominator(), "output": OutputNorm()}
