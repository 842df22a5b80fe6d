"""The figures of drivers/bench_gpu.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from mpi4py import MPI

from a2d_mpi.attention.methods import Attention2D
from a2d_mpi.comm.gpus import bind_gpu, gpu_aware
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import flops
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments.bench_tile import MASKS, find_torch, print_speeds, torch_calls
from a2d_mpi.experiments.benchmark import SCHEMA, KernelTimes, add_kernel_times
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.grids import grid_shape
from a2d_mpi.experiments.hdf5 import check_output
from a2d_mpi.experiments.inputs import random_inputs
from a2d_mpi.experiments.measure import Measurement, origin_of
from a2d_mpi.experiments.options import FAILED_CHECK
from a2d_mpi.experiments.timing import in_turn
from a2d_mpi.masks.patterns import make_mask

MEBI = 1 << 20


def bench_gpu(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Run the benchmark that is asked for; returns the exit code."""
    if args.output:
        together(comm, lambda: check_output(args.output, SCHEMA), on=0)
    device, sharing = bind_gpu(comm)
    aware, why = gpu_aware(args.transfers)
    how = f"{'device' if aware else 'host'} transfers ({why})"
    turns = "one" if sharing == 1 else f"{sharing} {'at once (MPS)' if _mps() else 'in turns'}"
    if comm.rank == 0:
        print(f"{device.description}, {comm.size} ranks, {turns} on a GPU, {how}", flush=True)
    times = KernelTimes({}, {})
    right = BENCHMARKS[args.what](comm, args, device, times)
    if args.output:
        times.attributes |= origin_of(comm, device)
        times.attributes |= {x: y for x, y in vars(args).items() if y is not None}
        times.attributes |= {"ranks": comm.size, "ranks_of_a_gpu": turns, "way": how}
        times.attributes["right"] = right
        chosen = [x for x in (args.kernel, args.transfers) if x != "auto"]
        chosen += [f"{args.nheads_kv} KV heads"] * (args.nheads_kv is not None)
        chosen += ["of masks"] * (tuple(args.masks) != MASKS)
        name = " ".join([args.what, *chosen]) + " with MPS" * (sharing > 1 and _mps())
        together(comm, lambda: add_kernel_times(args.output, name, times), on=0)
    return 0 if right else FAILED_CHECK


def _mps() -> bool:
    """Tell whether NVIDIA's MPS daemon runs: without it, ranks that share a GPU take turns."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return os.path.exists(os.path.join(pipes, "control"))


def kernel(
    comm: MPI.Intracomm, args: argparse.Namespace, device: Device, times: KernelTimes
) -> bool:
    """TFLOP/s of the library on one rank, and of torch; returns whether all is right."""
    # A mask that is wrong is refused before any has run.
    together(comm, lambda: [make_mask(mask, args.seqlen) for mask in args.masks])
    torch, right = find_torch(), True
    if torch is not None and not torch.cuda.is_available():  # its build for CPUs
        print("torch has no GPU: nothing to compare with")
        torch = None
    for mask in args.masks:
        with _problem(MPI.COMM_SELF, mask, args, device) as run:
            calls = {f"{mask}/{phase}/a2d_mpi": getattr(run, phase) for phase in PHASES}
            if torch is not None and mask in MASKS:
                calls |= _torch_calls(torch, run, mask)
            _medians(calls, args.trials, comm, device, times)
            right &= _passes(run)
            area = run.plan.area()
        for phase in PHASES:
            work = flops(area, args.nheads, args.headdim, phase == "backward")
            times.attributes[f"tflop/{mask}/{phase}"] = work / 1e12
        print_speeds(times, mask)
    return right


def split(
    comm: MPI.Intracomm, args: argparse.Namespace, device: Device, times: KernelTimes
) -> bool:
    """Time of all ranks together over the time of one rank alone, causal."""
    with (
        _problem(comm, "causal", args, device) as shared,
        _problem(MPI.COMM_SELF, "causal", args, device) as alone,
    ):
        calls: dict[str, Callable] = {}
        for phase in PHASES:
            calls[f"{phase} together"] = getattr(shared, phase)
            calls[f"{phase} alone"] = getattr(alone, phase) if comm.rank == 0 else lambda: None
        seconds = _medians(calls, args.trials, comm, device, times)
        right = _passes(shared)
        staged = comm.allreduce(shared.plan.staged_bytes)
    if comm.rank == 0:
        for phase in PHASES:
            one, all_ = seconds[f"{phase} alone"], seconds[f"{phase} together"]
            print(
                f"{phase:<8} 1 rank {1e3 * one:8.2f} ms   {comm.size} ranks {1e3 * all_:8.2f} ms"
                f"   ratio {all_ / one:.2f}"
            )
        print(f"copied through the host: {staged} bytes")
    return right


def transfers(
    comm: MPI.Intracomm, args: argparse.Namespace, device: Device, times: KernelTimes
) -> bool:
    """GB/s that each rank receives from the one before it."""
    from a2d_mpi.comm.device_transport import DeviceTransport

    transport = DeviceTransport(device, staged=not gpu_aware(args.transfers)[0])
    before, after = ((comm.rank + i) % comm.size for i in (-1, 1))
    right = True
    for size in (MEBI, 16 * MEBI, 128 * MEBI):
        sent = device.upload(np.full(size, comm.rank + 1, np.uint8))
        received = device.empty((size,), np.uint8)

        def shift(sent=sent, received=received):
            messages = transport.receive(comm, received, before, 0)
            messages += transport.send(comm, sent, after, 0)
            transport.wait(messages)

        name = f"{size // MEBI} MiB"
        seconds = _medians({name: shift}, args.trials, comm, device, times)[name]
        right &= bool((device.download(received) == before + 1).all())
        if comm.rank == 0:
            print(f"{size // MEBI:4} MiB   {size / seconds / 1e9:6.1f} GB/s per rank", flush=True)
    staged = comm.allreduce(transport.staged_bytes)
    if comm.rank == 0:
        print(f"copied through the host: {staged} bytes")
    return comm.allreduce(right, MPI.LAND)


BENCHMARKS = {"kernel": kernel, "split": split, "transfers": transfers}


@contextmanager
def _problem(
    comm: MPI.Intracomm, mask: str, args: argparse.Namespace, device: Device
) -> Iterator[Measurement]:
    """A plan on the squarest grid, with random inputs on the device."""
    grid = ProcessGrid(comm, *grid_shape(comm.size))
    sizes = ("seqlen", "nheads", "nheads_kv", "headdim", "dtype", "kernel", "transfers")
    plan = Attention2D(grid, make_mask(mask, args.seqlen), **{x: getattr(args, x) for x in sizes})
    yield Measurement(plan, random_inputs(plan, True), True, device)
    plan.free()
    grid.free()


def _medians(
    calls: dict[str, Callable],
    trials: int,
    comm: MPI.Intracomm,
    device: Device,
    times: KernelTimes,
) -> dict[str, float]:
    seconds = in_turn(calls, trials, comm, warmup=2, device=device)
    times.seconds |= seconds
    return {name: float(np.median(x)) for name, x in seconds.items()}


def _passes(run: Measurement) -> bool:
    """Compare a sample with float64."""
    run.check(rows=8)
    for name, check in run.checks.items():
        if not check.passed and run.plan.grid.comm.rank == 0:
            print(f"{name} is off by {check.error:.2e}, allowed are {check.bound:.2e}")
    return all(check.passed for check in run.checks.values())


def _torch_calls(torch, run: Measurement, mask: str) -> dict[str, Callable]:
    """Calls of torch on the same tensors, by phase and backend, where the backend takes them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = getattr(torch, run.plan.dtype.name)
    names = ("q", "k", "v", "dout")
    tensors = [torch.from_dlpack(run.tensors[x].view(np.int16)).view(dtype) for x in names]
    shared = {"enable_gqa": True} if run.plan.nheads != run.plan.nheads_kv else {}
    calls = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
        backend = partial(sdpa_kernel, getattr(SDPBackend, name))
        try:
            found = torch_calls(
                torch, *tensors, mask == "causal", backend, torch.cuda.synchronize, **shared
            )
        except RuntimeError:
            continue
        calls |= {f"{mask}/{x}/torch {name.split('_')[0]}": found[x] for x in PHASES}
    return calls
