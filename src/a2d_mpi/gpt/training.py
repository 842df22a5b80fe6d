"""Training of a GPT, step by step, by all ranks together, with Adam (arXiv:1412.6980)."""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.failures import Failures
from a2d_mpi.core.config import PHASES
from a2d_mpi.devices import device_of
from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.cost import STEP_PARTS
from a2d_mpi.gpt.exchange import GradientSum, total
from a2d_mpi.gpt.layers import module_of
from a2d_mpi.gpt.model import GPT, Attention
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.text import Batch
from a2d_mpi.linear.plan import LinearAttention

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
    """Adam with decoupled weight decay (Kingma and Ba, arXiv:1412.6980), on flat arrays.

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


class Training:
    """Weights of a GPT, their gradients and Adam's moments, the same on all ranks.

    Parameters
    ----------
    comm : Intracomm
        All ranks of the plans.
    weights : Parameters
        NumPy or CuPy arrays, of the same kind as `moments`.
    moments : (2, parameters) array
        Adam's moments.
    done : int
        Steps so far.
    recompute : bool
        `checkpoint` of `a2d_mpi.gpt.model.GPT`.
    transfers : {"auto", "device", "host"}
        Path of CuPy arrays to MPI, as of a plan.
    failures : Failures, optional
        `ProcessGrid.failures` of these ranks, if MPI may continue when one of them dies.

    Attributes
    ----------
    weights, gradients : Parameters
    adam : Adam
    sum : GradientSum or None
        None after `free`.
    linear : LinearAttention or None
        Plan of the model's linear layers.  The caller sets it if the model has any.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        weights: Parameters,
        moments: Array,
        done: int = 0,
        recompute: bool = False,
        transfers: str = "auto",
        failures: Failures | None = None,
    ) -> None:
        self.weights, self._recompute, self._transfers = weights, recompute, transfers
        zeros = module_of(weights.flat).zeros_like(weights.flat)
        self.gradients = Parameters(weights.config, zeros)
        self.adam = Adam(weights, moments, done)
        self.linear: LinearAttention | None = None
        self.sum: GradientSum | None = None
        self.go_on(comm, failures)

    def go_on(self, comm: MPI.Intracomm, failures: Failures | None = None) -> None:
        """Use another communicator from now on, for example the surviving ranks after a loss.

        Collective over the new communicator.
        """
        self.free()
        self._comm, self._failures = comm, failures or Failures(comm, [])
        way = {"transfers": self._transfers, "failures": failures}
        self.sum = GradientSum(comm, self.gradients.flat, **way)

    def step(self, plan: AttentionPlan, batch: Batch, rate: float) -> tuple[float, dict]:
        """Do a training step.  Collective.

        Parameters
        ----------
        plan : AttentionPlan
            A plan with the sizes of the model.
        batch : Batch
            The sequence of all ranks.
        rate : float
            Learning rate.

        Returns
        -------
        float
            Loss before the step, nats per target.
        dict of str to float
            Seconds of this rank by `a2d_mpi.gpt.cost.STEP_PARTS`: attention without waits, waits
            of attention, waits for sums of gradients, Adam, and everything else.

        Raises
        ------
        FloatingPointError
            On all ranks, if the loss, the gradients or the new weights are not finite.
        RanksLost
            On all surviving ranks, if a rank died; the weights have not changed.
        """
        start = time.perf_counter()
        spent, count = Counter(), max(1, int((batch.targets >= 0).sum()))
        timed, linear = _timed(plan, spent), self.linear and _timed(self.linear, spent)
        with self._failures.all_or_none():
            loss = self.loss(timed, batch, count, self.gradients, self.sum.start, linear=linear)
            marks = [time.perf_counter()]
            self.sum.finish()
            marks.append(time.perf_counter())
            loss = total(self._comm, loss)
        marks.append(time.perf_counter())
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}")
        self.adam.update(self.gradients, rate)
        marks.append(time.perf_counter())
        waited, agreed, adam = np.diff(marks).tolist()
        attention, other = spent["total"] - spent["wait"], marks[0] - start - spent["total"]
        seconds = attention, spent["wait"], waited + agreed, adam, other
        return loss, dict(zip(STEP_PARTS, seconds))

    def loss(
        self, attention: Attention, batch: Batch, count: int, *backward: Any, linear: Any = None
    ) -> float:
        """Compute this rank's term of a batch's mean loss; see `a2d_mpi.gpt.model.GPT.loss`.

        `backward` are its arguments `gradients` and `finished`.
        """
        own, upload = attention.tokens, device_of(self.weights.flat).upload
        linear, positions = linear or self.linear, batch.positions[own]
        model = GPT(self.weights, attention, positions, self._recompute, linear)
        tokens, targets = (upload(x[own]) for x in (batch.tokens, batch.targets))
        return model.loss(tokens, targets, count, *backward)

    def free(self) -> None:
        """Free the communicator.  Collective, also after a loss."""
        if self.sum:
            self.sum.free()
            self.sum = None


def _timed(plan: AttentionPlan | LinearAttention, spent: Counter) -> SimpleNamespace:
    """Return a plan that adds the seconds of its calls to `spent`, as "total" and "wait"."""

    def call(phase: str, *tensors: Array) -> tuple:
        results = getattr(plan, phase)(*tensors)
        spent.update({x: plan.timings[f"{phase}/{x}"] for x in ("total", "wait")})
        return results

    calls = {phase: partial(call, phase) for phase in PHASES}
    return SimpleNamespace(tokens=plan.tokens, **calls)
