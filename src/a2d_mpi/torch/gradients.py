"""Sums and averages of the gradients of a model's parameters over ranks."""

from __future__ import annotations

from hashlib import blake2b

import torch
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call
from a2d_mpi.comm.survival import NoFailures
from a2d_mpi.torch.sums import GradientSum
from a2d_mpi.torch.tensors import array_of, current_stream

BUCKET = 64 << 20  # most bytes that are summed together, but for a larger parameter


class Gradients:
    """The gradients of a model, which are summed over ranks in place.

    They are summed in float32, or in float64 if the model has float64, in the order of ranks: all
    ranks get the same bits.  A parameter that has a gradient on some ranks only, as an expert
    without tokens, counts as zero on the others.  If no rank has one, it stays None.

    Parameters
    ----------
    model : torch.nn.Module
        The same on all ranks, on one device.  Its parameters may change between sums.
    comm : Intracomm
        The caller's communicator; a duplicate is used until `free`.
    failures : NoFailures, optional
        `ProcessGrid.failures` of a grid of these ranks, for an MPI that continues when ranks die.
        `comm` must be the grid's, or in ``failures.others``.
    """

    def __init__(
        self, model: torch.nn.Module, comm: MPI.Intracomm, failures: NoFailures | None = None
    ) -> None:
        self._model, self._comm, self._failures = model, comm, failures or NoFailures(comm, [])
        self._sum: GradientSum | None = None
        self._made = ""  # for these parameters

    def add(self, ranks: int = 1, problem: str | None = None) -> None:
        """Replace each gradient by its sum over ranks, divided by `ranks`.  Collective.

        Parameters
        ----------
        ranks : int
        problem : str, optional
            What is wrong on this rank: then nothing is summed.

        Raises
        ------
        ValueError
            On all ranks, if any rank has a problem, a sparse gradient, complex parameters or
            DTensors, or models differ.  Gradients are then as they were.
        RanksLost
            With `failures`, on all surviving ranks, if a rank died.
        """
        call = Call(self._comm)
        # An optimizer also steps on the gradient of a parameter that was frozen after `backward`.
        every = [x for x in self._model.parameters() if x.requires_grad or x.grad is not None]
        for x in every:
            if x.is_complex() or hasattr(x, "placements"):
                kind = "complex" if x.is_complex() else "DTensors, whose gradients FSDP sums"
                problem = problem or f"parameters are {kind}"
            if x.grad is not None and x.grad.layout != torch.strided:
                problem = problem or f"gradients must be dense, got layout {x.grad.layout}"
        kinds = str([(tuple(x.shape), x.dtype) for x in every]).encode()
        said = f"{len(every)} tensors (digest {blake2b(kinds, digest_size=4).hexdigest()})"
        with self._failures.translated(), current_stream():
            call.problem = problem
            call.agree({"parameters to train": said})
            if every:
                self._make(every, said)
            for bucket in self._buckets if every else ():
                self._add(bucket, ranks)

    def _make(self, every: list[torch.nn.Parameter], said: str) -> None:
        """Cut parameters into buckets, and make a buffer for the largest one.  Collective."""
        wide = any(x.dtype == torch.float64 for x in every)
        dtype = torch.float64 if wide else torch.float32
        buckets, size, largest = [[]], 0, 0
        for x in every:
            if size * dtype.itemsize >= BUCKET:
                buckets.append([])
                size = 0
            buckets[-1].append(x)
            size += x.numel() + 1  # the last element counts the ranks that have the gradient
            largest = max(largest, size)
        self._buckets = buckets
        if said != self._made:
            self.free()
            self._flat = torch.empty(largest, dtype=dtype, device=every[0].device)
            self._sum = GradientSum(self._comm, array_of(self._flat), failures=self._failures)
            self._made = said

    def _add(self, bucket: list[torch.nn.Parameter], ranks: int) -> None:
        """Sum the gradients of a bucket."""
        sizes = [x.numel() + 1 for x in bucket]
        parts = self._flat[: sum(sizes)].split(sizes)
        for x, part in zip(bucket, parts):
            part.fill_(x.grad is not None)
            part[:-1] = 0 if x.grad is None else x.grad.detach().reshape(-1)
        self._sum.start(slice(0, sum(sizes)))
        self._sum.finish()
        for x, part in zip(bucket, parts):
            if part[-1] != 0:
                x.grad = torch.empty_like(x) if x.grad is None else x.grad
                x.grad.copy_(part[:-1].div_(ranks).view(x.shape))

    def free(self) -> None:
        """Free the duplicate of the communicator.  Collective, also after a loss."""
        if self._sum is not None:
            self._sum.free()
        self._sum, self._made = None, ""


def sum_gradients(
    model: torch.nn.Module, comm: MPI.Intracomm, failures: NoFailures | None = None
) -> None:
    """Sum the gradients of a module of your own over ranks, after `backward`.  Collective.

    For modules that call `attend`, if every rank has its own term of the loss.  Gradients of a
    `ContextParallel` are whole when `backward` ends.

    Parameters
    ----------
    model : torch.nn.Module
        The same model on all ranks, on one device.
    comm : Intracomm
    failures : NoFailures, optional
        As of `Gradients`.

    Raises
    ------
    ValueError, RanksLost
        As of `Gradients.add`.  Also ValueError if a gradient holds an earlier sum, or there is
        nothing to train.
    """
    problem, every = None, [x for x in model.parameters() if x.grad is not None]
    if not any(x.requires_grad for x in model.parameters()):
        problem = "the model has no parameters to train"
    for x in every:
        # A backward pass changes a gradient once, and so does zero_grad if it keeps the tensor.
        changes = x.grad._version - getattr(x.grad, "_version_summed", -2)
        if changes == 0 or (changes == 1 and x.grad.any()):
            problem = (
                "a gradient still holds the sum over ranks of an earlier step: call zero_grad() "
                "before the next backward pass, or sum once after several passes"
            )
    gradients = Gradients(model, comm, failures)
    try:
        gradients.add(problem=problem)
    finally:  # all ranks raise an error, or none does
        gradients.free()
    for x in model.parameters():
        if x.grad is not None:
            x.grad._version_summed = x.grad._version
