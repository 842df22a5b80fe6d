"""Training of a GPT, step by step, by all ranks together."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.comm.failures import Failures
from a2d_mpi.devices import device_of
from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.adam import Adam
from a2d_mpi.gpt.cost import STEP_PARTS
from a2d_mpi.gpt.gradients import GradientSum, total
from a2d_mpi.gpt.layers import module_of
from a2d_mpi.gpt.model import GPT, Attention
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.gpt.text import Batch
from a2d_mpi.linear.plan import LinearAttention


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
        timed, count = _Timed(plan), max(1, int((batch.targets >= 0).sum()))
        linear = self.linear and _Timed(self.linear, timed)
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
        attention = timed.seconds - timed.wait
        other = marks[0] - start - timed.seconds
        return loss, dict(zip(STEP_PARTS, (attention, timed.wait, waited + agreed, adam, other)))

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


class _Timed:
    """A plan that counts the seconds of its calls, in itself or in `total`."""

    def __init__(self, plan: AttentionPlan | LinearAttention, total: _Timed | None = None) -> None:
        self._plan, self.tokens, self._total = plan, plan.tokens, total or self
        self.seconds = self.wait = 0.0

    def forward(self, *tensors: Array) -> tuple:
        return self._called("forward", tensors)

    def backward(self, *tensors: Array) -> tuple:
        return self._called("backward", tensors)

    def _called(self, phase: str, tensors: Sequence[Array]) -> tuple:
        results = getattr(self._plan, phase)(*tensors)
        self._total.seconds += self._plan.timings[f"{phase}/total"]
        self._total.wait += self._plan.timings[f"{phase}/wait"]
        return results
