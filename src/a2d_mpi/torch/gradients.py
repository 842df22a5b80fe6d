"""Sums and averages of the gradients of a model's parameters over ranks."""

from __future__ import annotations

from hashlib import blake2b

import torch
from mpi4py import MPI

from a2d_mpi.comm.agreement import Call
from a2d_mpi.comm.gpus import gpu_aware
from a2d_mpi.comm.survival import NoFailures
from a2d_mpi.torch.exchange import exchange

BUCKET = 1 << 24  # most elements that are summed together


def add_gradients(
    model: torch.nn.Module,
    comm: MPI.Intracomm,
    failures: NoFailures | None = None,
    ranks: int = 1,
    problem: str | None = None,
) -> None:
    """Replace each gradient by its sum over ranks, divided by `ranks`.  Collective.

    Gradients are summed in float32, or in float64 if the model has float64, in the order of ranks:
    all ranks get the same bits, in every run.  A parameter that has a gradient on some ranks only,
    as an expert without tokens, counts as zero on the others.  If no rank has one, it stays None.

    Parameters
    ----------
    model : torch.nn.Module
        The same on all ranks, on one device.
    comm : Intracomm
    failures : NoFailures, optional
        `ProcessGrid.failures` of a grid of these ranks, for an MPI that continues when ranks die.
        `comm` must be the grid's, or in ``failures.others``.
    ranks : int
    problem : str, optional
        What is wrong on this rank: then nothing is summed.

    Raises
    ------
    ValueError
        On all ranks, if any rank has a problem, a sparse gradient, complex parameters or DTensors,
        or models differ.  Gradients are then as they were.
    RanksLost
        With `failures`, on all surviving ranks, if a rank died.
    """
    call = Call(comm)
    call.problem = problem
    # An optimizer also steps on the gradient of a parameter that was frozen after `backward`.
    every = [x for x in model.parameters() if x.requires_grad or x.grad is not None]
    staged = False
    with call.checks():
        for x in every:
            if x.is_complex() or hasattr(x, "placements"):
                kind = "complex" if x.is_complex() else "DTensors, whose gradients FSDP sums"
                raise ValueError(f"parameters are {kind}")
            if x.grad is not None and x.grad.layout != torch.strided:
                raise ValueError(f"gradients must be dense, got layout {x.grad.layout}")
        staged = any(x.is_cuda for x in every) and not gpu_aware()[0]
    kinds = str([(tuple(x.shape), x.dtype) for x in every]).encode()
    said = f"{len(every)} tensors (digest {blake2b(kinds, digest_size=4).hexdigest()})"
    wide = any(x.dtype == torch.float64 for x in every)
    dtype = torch.float64 if wide else torch.float32
    failures, place = failures or NoFailures(comm, []), every[0].device if every else None
    with failures.translated():
        call.agree({"parameters to train": said})
        for bucket in _buckets(every, BUCKET):
            sizes = [x.numel() + 1 for x in bucket]  # one more: how many ranks have the gradient
            whole = torch.empty(sum(sizes), dtype=dtype, device="cpu" if staged else place)
            parts = whole.split(sizes)
            for x, part in zip(bucket, parts):
                part[:-1] = 0 if x.grad is None else x.grad.detach().reshape(-1)
                part[-1] = x.grad is not None
            for part in whole.split(BUCKET):
                _sum(part, comm, failures)
            for x, part in zip(bucket, parts):
                if part[-1] != 0:
                    x.grad = torch.empty_like(x) if x.grad is None else x.grad
                    x.grad.copy_(part[:-1].div_(ranks).view(x.shape))


def _buckets(every: list[torch.nn.Parameter], most: int) -> list[list[torch.nn.Parameter]]:
    """Cut parameters into buckets of `most` elements, but for the last parameter of each."""
    buckets, size = [], most
    for x in every:
        if size >= most:
            buckets.append([])
            size = 0
        buckets[-1].append(x)
        size += x.numel() + 1
    return buckets


def _sum(x: torch.Tensor, comm: MPI.Intracomm, failures: NoFailures) -> None:
    """Replace a vector by its sum over ranks; each rank adds its share, in the order of ranks.

    Each rank sends 2 (P-1) / P of the bytes, as in a ring all-reduce.
    """
    share = -(-len(x) // comm.size)
    shares = [x[i * share : (i + 1) * share] for i in range(comm.size)]
    received = x.new_empty(comm.size, len(shares[comm.rank]))
    _synchronize(x)
    exchange(comm, failures, shares, received)
    summed = received[0].clone()
    for part in received[1:]:
        summed += part
    _synchronize(x)
    exchange(comm, failures, [summed] * comm.size, shares)


def _synchronize(x: torch.Tensor) -> None:
    """Wait until the memory of a tensor holds its numbers, which MPI reads."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()


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
        As of `add_gradients`.

    Raises
    ------
    ValueError, RanksLost
        As of `add_gradients`.  Also ValueError if a gradient holds an earlier sum, or there is
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
    add_gradients(model, comm, failures, problem=problem)
    for x in model.parameters():
        if x.grad is not None:
            x.grad._version_summed = x.grad._version
