"""Sums of the gradients of a model's parameters over ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import accumulate

import torch
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call, agree
from a2d_mpi.comm.survival import NoFailures
from a2d_mpi.torch.sums import GradientSum
from a2d_mpi.torch.tensors import array_of, current_stream

FORGOTTEN = "has a gradient, but was frozen or absent when GradientHooks was made: make new hooks"
BUCKET = 25 << 20  # bytes that are sent together, as in PyTorch's DistributedDataParallel


class GradientHooks:
    """Hooks that sum gradients over ranks during the backward pass.

    ::

        hooks = GradientHooks(model, comm)
        for ...:
            optimizer.zero_grad()
            loss.backward()  # this rank's term of the loss; also several times
            hooks.finish()
            optimizer.step()

    Gradients are summed in float32 (float64 if the model has float64), in the order of ranks, so
    that all ranks get the same bits.  If only some ranks have a gradient, it counts as zero on the
    other ranks.  If no rank has a gradient, it stays None, and optimizers skip the parameter.

    With several backward passes before `finish`, the gradients of all of them are summed once.  In
    the first step messages of the first pass may be sent in vain; later steps wait for as many
    passes as the step before had.

    Parameters
    ----------
    model : torch.nn.Module
        The same model on all ranks, on one device.
    comm : Intracomm
        The caller's communicator; a duplicate is used until `free`.
    failures : NoFailures, optional
        `ProcessGrid.failures` of a grid of these ranks, for an MPI that continues when ranks die.
        `comm` must be the grid's, or in ``failures.others``.

    Raises
    ------
    ValueError
        On all ranks, if models differ in parameters, shapes or dtypes, have complex parameters or
        DTensors, or have no parameters to train.  `finish` raises it on all ranks, if on any rank
        a gradient is sparse, still holds the sum of an earlier call, or belongs to a parameter
        that was frozen, or no parameter of the model, when the hooks were made.  Gradients are
        then as they were.
    RanksLost
        With `failures`, on all surviving ranks, if a rank died: also from ``backward()``.  Weights
        are as they were, gradients are not.  `free` the hooks and make new ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        comm: MPI.Intracomm,
        failures: NoFailures | None = None,
    ) -> None:
        self._model = model
        # Reversed, because the backward pass finishes the last layers first.  An optimizer also
        # steps on the gradient of a parameter that was frozen after the backward pass.
        parameters = reversed([*model.parameters()])
        self._parameters = [x for x in parameters if x.requires_grad or x.grad is not None]
        sizes = [x.numel() for x in self._parameters]
        kinds = [(tuple(x.shape), x.dtype) for x in self._parameters]
        digest = hashlib.sha256(str(kinds).encode()).hexdigest()[:8]
        call = Call(comm)
        with call.checks():
            if not sizes:
                raise ValueError("the model has no parameters to train")
            if any(x.is_complex() for x in self._parameters):
                raise ValueError("complex parameters are not supported")
            if any(hasattr(x, "placements") for x in self._parameters):
                raise ValueError(
                    "parameters are DTensors, as of fully_shard, which sums their gradients itself"
                )
        self._failures = failures or NoFailures(comm, [])
        said = f"{len(sizes)} tensors of {sum(sizes)} elements (digest {digest})"
        with self._failures.translated():
            call.agree({"parameters": said})
        wide = any(x.dtype == torch.float64 for x in self._parameters)
        dtype = torch.float64 if wide else torch.float32
        sizes = [x + 1 for x in sizes]  # the last element counts the ranks that have the gradient
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self._parameters[0].device)
        with self._failures.translated(), current_stream():
            self._sum = GradientSum(comm, array_of(flat), failures=self._failures)
        self._parts = dict(zip(self._parameters, flat.split(sizes)))
        self._buckets: list[list[torch.nn.Parameter]] = [[]]
        for x in self._parameters:
            if sum(self._parts[y].nbytes for y in self._buckets[-1]) >= BUCKET:
                self._buckets.append([])
            self._buckets[-1].append(x)
        self._number = {x: i for i, bucket in enumerate(self._buckets) for x in bucket}
        ends = [0, *accumulate(sum(len(self._parts[x]) for x in y) for y in self._buckets)]
        self._slices = [slice(*x) for x in zip(ends, ends[1:])]
        self._begin(Counter())
        self._handles = [
            x.register_post_accumulate_grad_hook(self._arrive)
            for x in self._parameters
            if x.requires_grad
        ]

    def _begin(self, before: Counter) -> None:
        """Expect as many gradients of each parameter as `before`, at least one."""
        self._expected, self._arrived = before, Counter()
        self._started, self._problem = 0, None
        self._late: set[int] = set()  # buckets with a gradient that came after they were sent

    def _arrive(self, parameter: torch.nn.Parameter) -> None:
        """Send the next buckets whose gradients are complete."""
        self._arrived[parameter] += 1
        self._gradient(parameter)
        if self._number[parameter] < self._started:
            self._late.add(self._number[parameter])
        while self._started < len(self._buckets):
            if any(
                self._arrived[x] < max(1, self._expected[x]) for x in self._buckets[self._started]
            ):
                break
            self._start()

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the gradient, or None if it is none that can be summed."""
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            self._problem = f"gradients must be dense, got one of layout {gradient.layout}"
            return None
        # A backward pass changes a gradient once, and so does zero_grad if it keeps the tensor.
        changes = gradient._version - getattr(gradient, "_version_summed", -2)
        if changes == 0 or (changes == 1 and gradient.any()):
            self._problem = (
                "a gradient still holds the sum over ranks of an earlier step: call zero_grad() "
                "before the next backward pass, or sum once after several passes"
            )
        return gradient

    def _start(self) -> None:
        """Send the next bucket; all ranks send buckets in the same order."""
        self._send(self._started)
        self._started += 1

    def _send(self, number: int) -> None:
        for x in self._buckets[number]:
            part, gradient = self._parts[x], self._gradient(x)
            part.fill_(gradient is not None)
            part[:-1] = 0 if gradient is None else gradient.detach().reshape(-1)
        with self._failures.translated(), current_stream():
            self._sum.start(self._slices[number])

    def finish(self) -> None:
        """Wait until every gradient holds its sum over ranks.  Collective."""
        with self._failures.translated():
            self._finish()

    def _finish(self) -> None:
        while self._started < len(self._buckets):
            self._start()
        with current_stream():
            self._sum.finish()
        problem, late = self._problem, self._late
        for name, x in self._model.named_parameters():
            if x.grad is not None and x not in self._parts:
                problem = f"{name} {FORGOTTEN}"
        self._begin(self._arrived)
        agree(self._sum.comm, problem)
        for number in sorted(set().union(*self._sum.comm.allgather(late))):
            self._send(number)
        with current_stream():
            self._sum.finish()
        for x, part in self._parts.items():
            if x.grad is None:
                if part[-1] == 0:
                    continue
                x.grad = torch.empty_like(x)
            x.grad.copy_(part[:-1].view(x.shape))
            x.grad._version_summed = x.grad._version

    def free(self) -> None:
        """Remove the hooks and free the communicator.  Collective, also after a loss."""
        for handle in self._handles:
            handle.remove()
        self._sum.free()


def sum_gradients(
    model: torch.nn.Module, comm: MPI.Intracomm, failures: NoFailures | None = None
) -> None:
    """Sum the gradients of a model over ranks after a backward pass.  Collective.

    `GradientHooks` does this during the backward pass, which hides the messages.

    Parameters
    ----------
    model : torch.nn.Module
        The same model on all ranks, on one device.
    comm : Intracomm
    failures : NoFailures, optional
        As of `GradientHooks`.

    Raises
    ------
    ValueError, RanksLost
        As in `GradientHooks`.
    """
    hooks = GradientHooks(model, comm, failures)
    try:
        hooks.finish()
    finally:  # all ranks raise an error, or none does
        hooks.free()
