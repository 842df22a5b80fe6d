"""Sums of the gradients of a model's parameters over ranks."""

from __future__ import annotations

import hashlib

import torch
from mpi4py import MPI

from a2d_mpi.comm.agreement import agree
from a2d_mpi.gpt.gradients import GradientSum
from a2d_mpi.torch.tensors import array_of, current_stream

BUCKET = 25 << 20  # bytes that are sent together, as in PyTorch's DistributedDataParallel


class GradientHooks:
    """Hooks that sum gradients over ranks during the backward pass.

    ::

        hooks = GradientHooks(model, comm)
        for ...:
            optimizer.zero_grad()
            loss.backward()  # this rank's term of the loss
            hooks.finish()
            optimizer.step()

    Gradients are summed in float32 (float64 if the model has float64), in the order of ranks, so
    that all ranks get the same bits.  If only some ranks have a gradient, it counts as zero on the
    other ranks.  If no rank has a gradient, it stays None, and optimizers skip the parameter.
    There must be exactly one backward pass between two calls of `finish`.

    Parameters
    ----------
    model : torch.nn.Module
        The same model on all ranks, on one device.
    comm : Intracomm
        The caller's communicator; a duplicate is used until `free`.

    Raises
    ------
    ValueError
        On all ranks, if models differ in parameters, shapes or dtypes, have complex parameters, or
        have no parameters to train.  `finish` raises it on all ranks, if a parameter got a second
        gradient before `finish` on any rank.
    """

    def __init__(self, model: torch.nn.Module, comm: MPI.Intracomm) -> None:
        # Reversed, because the backward pass finishes the last layers first.
        self._parameters = [x for x in reversed([*model.parameters()]) if x.requires_grad]
        sizes = [x.numel() for x in self._parameters]
        kinds = [(tuple(x.shape), x.dtype) for x in self._parameters]
        digest = hashlib.sha256(str(kinds).encode()).hexdigest()[:8]
        problem = None if sizes else "the model has no parameters to train"
        if any(x.is_complex() for x in self._parameters):
            problem = "complex parameters are not supported"
        agree(comm, problem, {
            "parameters": f"{len(sizes)} tensors of {sum(sizes)} elements (digest {digest})"
        })  # fmt: skip
        wide = any(x.dtype == torch.float64 for x in self._parameters)
        dtype = torch.float64 if wide else torch.float32
        sizes = [x + 1 for x in sizes]  # the last element counts the ranks that have the gradient
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self._parameters[0].device)
        with current_stream():
            self._sum = GradientSum(comm, array_of(flat))
        self._parts = dict(zip(self._parameters, flat.split(sizes)))
        self._buckets: list[list[torch.nn.Parameter]] = [[]]
        for x in self._parameters:
            if sum(self._parts[y].nbytes for y in self._buckets[-1]) >= BUCKET:
                self._buckets.append([])
            self._buckets[-1].append(x)
        self._begin()
        self._handles = [
            x.register_post_accumulate_grad_hook(self._arrived) for x in self._parameters
        ]

    def _begin(self) -> None:
        self._missing, self._problem = set(self._parameters), None
        self._started, self._sent = 0, 0  # number of buckets, and of their elements

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        """Send the next buckets whose gradients are complete."""
        if parameter not in self._missing:
            self._problem = (
                "a parameter got a second gradient before finish(): call finish() after every "
                "backward pass"
            )
            return  # `finish` raises the error, on all ranks
        self._missing.remove(parameter)
        while self._started < len(self._buckets):
            if not self._missing.isdisjoint(self._buckets[self._started]):
                break
            self._start()

    def _start(self) -> None:
        """Send the next bucket; all ranks send buckets in the same order."""
        begin, bucket = self._sent, self._buckets[self._started]
        for x in bucket:
            part = self._parts[x]
            part.fill_(x.grad is not None)
            part[:-1] = 0 if x.grad is None else x.grad.detach().reshape(-1)
            self._sent += len(part)
        self._started += 1
        with current_stream():
            self._sum.start(slice(begin, self._sent))

    def finish(self) -> None:
        """Wait until every gradient holds its sum over ranks.  Collective."""
        while self._started < len(self._buckets):
            self._start()
        with current_stream():
            self._sum.finish()
        problem = self._problem
        self._begin()
        agree(self._sum.comm, problem)
        for x, part in self._parts.items():
            if x.grad is None:
                if part[-1] == 0:
                    continue
                x.grad = torch.empty_like(x)
            x.grad.copy_(part[:-1].view(x.shape))

    def free(self) -> None:
        """Remove the hooks and free the communicator.  Collective."""
        for handle in self._handles:
            handle.remove()
        self._sum.free()


def sum_gradients(model: torch.nn.Module, comm: MPI.Intracomm) -> None:
    """Sum the gradients of a model over ranks after a backward pass.  Collective.

    `GradientHooks` does this during the backward pass, which hides the messages.

    Parameters
    ----------
    model : torch.nn.Module
        The same model on all ranks, on one device.
    comm : Intracomm

    Raises
    ------
    ValueError
        As in `GradientHooks`.
    """
    hooks = GradientHooks(model, comm)
    hooks.finish()
    hooks.free()
