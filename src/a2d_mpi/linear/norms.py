"""Normalisations of the output, and their gradients.

Arrays are token-major: sums are (n, H, D), or (n, H, D + 1) where the last column is the
denominator.  A forward function returns out, (n, H, D), and the scale of each row, from which the
backward function finds the gradient of the sums.
"""

from __future__ import annotations

import numpy as np

NORMS = ("none", "denominator", "output")
# What is added to a denominator, or to a mean square; 1e-6 as in the code of Katharopoulos et al.
EPSILON = 1e-6


class Norm:
    """A normalisation; this one leaves the sums as they are.

    Attributes
    ----------
    columns : int
        Columns of ones that values get: 1 for a denominator, else 0.
    """

    columns = 0

    def scale_shape(self, tokens: int, nheads: int) -> tuple[int, int, int] | None:
        """Shape of the scale; None if there is none."""
        return None

    def forward(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Out and scale."""
        return sums, None

    def backward(self, dout: np.ndarray, out: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        """Gradient of the sums."""
        return dout


class Denominator(Norm):
    """Divide by the sum of the weights (Katharopoulos et al., arXiv:2006.16236)."""

    columns = 1

    def scale_shape(self, tokens: int, nheads: int) -> tuple[int, int, int]:
        return tokens, nheads, 1

    def forward(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = 1 / (sums[..., -1:] + sums.dtype.type(EPSILON))  # (n, H, 1)
        return sums[..., :-1] * scale, scale

    def backward(self, dout: np.ndarray, out: np.ndarray, scale: np.ndarray) -> np.ndarray:
        along = (dout * out).sum(axis=2, keepdims=True)  # (n, H, 1)
        return np.concatenate([dout, -along], axis=2) * scale


class OutputNorm(Norm):
    """Divide by the root mean square of all heads of a token (TransNormer, arXiv:2307.14995)."""

    def scale_shape(self, tokens: int, nheads: int) -> tuple[int, int, int]:
        return tokens, 1, 1

    def forward(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        square = (sums * sums).mean(axis=(1, 2), keepdims=True)  # (n, 1, 1)
        scale = 1 / np.sqrt(square + sums.dtype.type(EPSILON))
        return sums * scale, scale

    def backward(self, dout: np.ndarray, out: np.ndarray, scale: np.ndarray) -> np.ndarray:
        along = (dout * out).mean(axis=(1, 2), keepdims=True)  # (n, 1, 1)
        return (dout - out * along) * scale


def make_norm(name: str) -> Norm:
    """Normalisation by its name, one of `NORMS`."""
    return {"none": Norm, "denominator": Denominator, "output": OutputNorm}[name]()
