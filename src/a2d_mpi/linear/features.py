"""Feature maps of queries and keys, normalisations of the output, and their gradients.

Arrays of normalisations are token-major: sums are (n, H, D), or (n, H, D + 1) if the last column
is the denominator.
"""

from __future__ import annotations

import numpy as np

# Added to a denominator or a mean square; 1e-6 as in the code of Katharopoulos et al.
EPSILON = 1e-6
# Of each element: the features y of x, and the gradient of x, given the gradient of y.
FEATURE_MAPS = {
    "none": (lambda x: x, lambda dy, y: dy),
    # Katharopoulos et al., arXiv:2006.16236
    "elu+1": (
        lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        lambda dy, y: dy * np.minimum(y, 1),
    ),
    "relu": (lambda x: np.maximum(x, 0), lambda dy, y: dy * (y > 0)),
}


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
