"""Adam (Kingma and Ba, arXiv:1412.6980) with decoupled weight decay, on flat arrays."""

from __future__ import annotations

import math

from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.parameters import Parameters

# The values of GPT-3.  DECAY is for weights of linear layers only; CLIP is the largest norm of the
# gradient.
BETAS, EPSILON, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


def learning_rate(step: int, rate: float, warmup: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine down to a tenth.

    Source: GPT-3 (arXiv:2005.14165).

    Parameters
    ----------
    step : int
        From 0.
    rate : float
        Highest learning rate.
    warmup, steps : int
        Steps of the warm-up, and steps in all.
    """
    if step < warmup:
        return rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Adam:
    """Adam's moments of all weights.

    Parameters
    ----------
    weights : Parameters
    moments : (2, parameters) array
        First and second moments; zeros at the start.
    done : int
        Number of updates so far.

    Attributes
    ----------
    step : int
        Number of updates so far.
    """

    def __init__(self, weights: Parameters, moments: Array, done: int = 0) -> None:
        self._weights, self.moments, self.step = weights, moments, done

    def update(self, gradients: Parameters, rate: float) -> float:
        """Update the weights; return the norm of the gradient before clipping.

        `gradients` are overwritten if they are clipped.  `rate` is the learning rate.

        Raises
        ------
        FloatingPointError
            If the norm is not finite; nothing is updated then.  Or if a new weight is not finite.
        """
        g, w = gradients.flat, self._weights.flat
        norm = float((g.astype("f8") ** 2).sum()) ** 0.5
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradient is {norm}")
        if norm > CLIP:
            g *= CLIP / norm
        self.step += 1
        (b1, b2), (m, v) = BETAS, self.moments
        m *= b1
        m += (1 - b1) * g
        v *= b2
        v += (1 - b2) * g**2
        for x in self._weights.named.values():
            if x.ndim == 2:
                x *= 1 - rate * DECAY
        unbiased = rate / (1 - b1**self.step)
        w -= unbiased * m / ((v / (1 - b2**self.step)) ** 0.5 + EPSILON)
        if not math.isfinite(w.sum(dtype="f8")):
            raise FloatingPointError("some weights are not finite")
        return norm
