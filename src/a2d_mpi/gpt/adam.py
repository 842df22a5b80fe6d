"""Adam (Kingma and Ba, arXiv:1412.6980) with decoupled weight decay, on flat arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.parameters import Parameters


@dataclass(frozen=True)
class LearningRate:
    """Learning rate by step: linear warm-up, then a cosine down to a tenth, as GPT-3.

    Attributes
    ----------
    rate : float
        The highest one.
    warmup, steps : int
        Steps of the warm-up, and all.
    """

    rate: float
    warmup: int
    steps: int

    def at(self, step: int) -> float:
        """Learning rate of a step, from 0."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Adam:
    """Adam's moments of all weights.

    Parameters
    ----------
    weights : Parameters
    moments : (2, parameters) array
        First and second moments; zeros at the start.
    betas, epsilon, decay, clip
        As GPT-3: decay of the weights of linear layers, largest norm of the gradient.

    Attributes
    ----------
    step : int
        Number of updates so far.
    """

    def __init__(
        self,
        weights: Parameters,
        moments: Array,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        decay: float = 0.1,
        clip: float = 1.0,
    ) -> None:
        self._weights, self.moments, self.step = weights, moments, 0
        self._betas, self._epsilon, self._decay, self._clip = betas, epsilon, decay, clip

    def update(self, gradients: Parameters, rate: float) -> float:
        """Update the weights; returns the norm of the gradient.

        Raises
        ------
        FloatingPointError
            If the norm is not finite, and nothing is updated, or a weight is not, then.
        """
        g, w = gradients.flat, self._weights.flat
        norm = float((g.astype("f8") ** 2).sum()) ** 0.5
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradient is {norm}")
        if norm > self._clip:
            g *= self._clip / norm
        self.step += 1
        (b1, b2), (m, v) = self._betas, self.moments
        m *= b1
        m += (1 - b1) * g
        v *= b2
        v += (1 - b2) * g**2
        for x in self._weights.named.values():
            if x.ndim == 2:
                x *= 1 - rate * self._decay
        unbiased = rate / (1 - b1**self.step)
        w -= unbiased * m / ((v / (1 - b2**self.step)) ** 0.5 + self._epsilon)
        if not math.isfinite(w.sum(dtype="f8")):
            raise FloatingPointError("there are weights that are not finite")
        return norm
