"""The program of `drivers/bench.py kernels`: kernels and torch's attention side by side."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import ModuleType

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.dtypes import as_dtype
from a2d_mpi.core.sizes import flops, parse_count
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.hdf5 import add, check_output
from a2d_mpi.experiments.measure import open_device
from a2d_mpi.experiments.options import FAILED_CHECK, BadOption
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.experiments.results import BENCHMARK_SCHEMA
from a2d_mpi.experiments.streams import progress
from a2d_mpi.experiments.summary import kernel_speeds
from a2d_mpi.experiments.tile import RandomTile
from a2d_mpi.experiments.timing import in_turn
from a2d_mpi.kernels import Kernel, check_kernel, make_kernel
from a2d_mpi.masks.patterns import make_mask

MASKS = ("full", "causal")  # masks that torch has
# Largest errors relative to the largest value of a tensor.
BOUNDS = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
BACKENDS = ("CUDNN", "FLASH", "EFFICIENT")  # backends of torch on a GPU
# Options of the driver, by device.
DEFAULTS = {
    "cpu": {
        "shapes": [(4096, 4, 128), (8192, 2, 64)],
        "dtype": "float32",
        "kernels": ["numpy", "auto"],
    },
    "gpu": {"shapes": [(16384, 16, 128)], "dtype": "bfloat16", "kernels": ["auto"]},
}


def shape(text: str) -> tuple[int, int, int]:
    """Parse an option that is a shape: seqlen, heads and headdim, as 4096x4x128."""
    try:
        seqlen, nheads, headdim = map(parse_count, text.split("x"))
        AttentionConfig(seqlen, nheads, headdim).check_room(1)
    except ValueError as error:
        raise BadOption(f"must be like 4096x4x128, got {text[:40]!r}: {error}") from None
    return seqlen, nheads, headdim


def bench_kernel(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Print a line for each shape, mask, phase and kernel; return the exit code."""
    together(comm, lambda: _check_alone(comm))
    return together(comm, lambda: _bench_kernel(args))


def _check_alone(comm: MPI.Intracomm) -> None:
    if comm.size > 1:
        raise ValueError(f"kernels are timed in one process, got {comm.size}")


def _bench_kernel(args: argparse.Namespace) -> int:
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.output:
        check_output(args.output, BENCHMARK_SCHEMA)
    for name in args.kernels:
        check_kernel(name, as_dtype(args.dtype))
    problems = []  # all options are checked before the first kernel runs
    for sizes, text in product(args.shapes, args.masks):
        config = AttentionConfig(*sizes, args.nheads_kv, dtype=args.dtype)
        problems.append((config, text, make_mask(text, config.seqlen)))
    device = _device(args.device)
    torch = _torch(device)
    origin = provenance("none", [socket.gethostname()], device.description)
    times: dict[str, object] = {
        "origin": origin,
        "threads": 1,
        "trials": args.trials,
        "dtype": args.dtype,
        "torch": str(torch.__version__) if torch else "none",
    }
    right = True
    print("{device}, {dtype}; {blas}, 1 thread; numpy {numpy_version}".format(**times, **origin))
    with threadpool_limits(1):
        for config, text, mask in (bar := progress(problems, desc="workloads")):
            sizes = config.seqlen, config.seqlen, config.nheads, config.nheads_kv, config.headdim
            tile = RandomTile(*sizes, mask, args.dtype, device)
            calls, error = {}, 0.0
            for kernel in (_kernel(name, tile) for name in args.kernels):
                by_phase = tile.calls(kernel)
                for phase in PHASES:
                    by_phase[phase]()
                error = float(np.max([error, tile.error()]))  # unlike max(), it keeps NaN
                calls |= {f"{phase}/{kernel.name}": by_phase[phase] for phase in PHASES}
            if torch is not None and text in MASKS:
                calls |= _torch_calls(torch, tile, text == "causal")
            of = f"{config.seqlen}x{config.nheads}x{config.headdim}/{text}"
            seconds = in_turn(calls, args.trials, device=device)
            times |= {f"{of}/{call}": x for call, x in seconds.items()}
            for phase in PHASES:
                work = flops(tile.area, config.nheads, config.headdim, phase == "backward")
                times[f"tflop/{of}/{phase}"] = work / 1e12
            bar.write("\n".join(_speeds(times, of)))
            if not error < BOUNDS[args.dtype]:
                right = False
                bar.write(f"{of}: results are WRONG by {error:.1e}")
    if args.output:
        name = args.name or f"{origin['device']}, {origin['blas']}"
        times["right"] = right
        add(args.output, BENCHMARK_SCHEMA, {"figures": {name.replace("/", " "): times}})
    return 0 if right else FAILED_CHECK


def _device(name: str) -> Device:
    """Return the GPU, or the host, after binding this process to one core."""
    if name == "gpu":
        return open_device(MPI.COMM_SELF, name)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return HOST


def _kernel(name: str, tile: RandomTile) -> Kernel:
    try:
        return make_kernel(name, tile.device, tile.q.dtype, tile.softmax_scale)
    except ImportError as error:
        raise ValueError(str(error)) from None


def _torch(device: Device) -> ModuleType | None:
    """Return the module torch; print why and return None if there is nothing to compare with."""
    try:
        import torch
    except ImportError:
        print("torch is not installed, so kernels are not compared with it")
        return None
    if device is HOST:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():  # torch may be built for CPUs only
        print("torch has no GPU, so kernels are not compared with it")
        return None
    return torch


def _torch_calls(
    torch: ModuleType, tile: RandomTile, causal: bool
) -> dict[str, Callable[[], None]]:
    """Return calls of torch on the same numbers, by phase, for each backend that takes them."""
    ways = {"torch": nullcontext}
    if tile.device is not HOST:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backends = {x: getattr(SDPBackend, f"{x}_ATTENTION") for x in BACKENDS}
        ways = {f"torch {x}": partial(sdpa_kernel, backend) for x, backend in backends.items()}
    dtype = getattr(torch, tile.q.dtype.name)
    options = {"is_causal": causal}
    if tile.q.shape[1] != tile.k.shape[1]:
        options["enable_gqa"] = True
    # As integers, because NumPy and CuPy cannot export bfloat16.
    tensors = (
        torch.from_dlpack(x.view(f"i{x.dtype.itemsize}")).view(dtype)
        for x in (tile.q, tile.k, tile.v, tile.dout)
    )
    # (batch, heads, tokens, headdim), contiguous: torch's fastest layout.
    *qkv, dout = (x.transpose(0, 1)[None].contiguous() for x in tensors)
    for x in qkv:
        x.requires_grad_()
    wait = (lambda: None) if tile.device is HOST else torch.cuda.synchronize

    def attend(way: Callable):
        with way():
            return torch.nn.functional.scaled_dot_product_attention(*qkv, **options)

    def forward(way: Callable) -> None:
        with torch.no_grad():
            attend(way)
        wait()

    def backward(out) -> None:
        for x in qkv:
            x.grad = None
        out.backward(dout, retain_graph=True)
        wait()

    calls = {}
    for name, way in ways.items():
        try:  # a backend may have a forward pass only
            out = attend(way)
            backward(out)
        except RuntimeError:
            continue
        calls[f"forward/{name}"] = partial(forward, way)
        calls[f"backward/{name}"] = partial(backward, out)
    return calls


def _speeds(times: dict[str, object], of: str) -> Iterator[str]:
    """Yield a line for each phase and implementation of a shape and mask ("shape/mask").

    A line has the median speed and two ratios: to the speed under the full mask, if it was timed
    before, and to the speed of torch's fastest backend.
    """
    speeds, (shape, mask) = kernel_speeds(times), of.split("/", 1)
    for phase in PHASES:
        here, full = speeds[f"{of}/{phase}"], speeds.get(f"{shape}/full/{phase}", {})
        torch = max((x for name, x in here.items() if name.startswith("torch")), default=None)
        for name, speed in here.items():
            unit, size = ("TFLOP/s", 1) if speed >= 1 else ("GFLOP/s", 1e-3)
            line = f"{f'{shape}/{mask[:40]}':<30} {phase:<8} {name:<12}{speed / size:7.4g} {unit}"
            if mask != "full" and name in full:
                line += f"   of the full mask's {speed / full[name]:.2f}"
            if torch and not name.startswith("torch"):
                line += f"   of torch's {speed / torch:.3f}"
            yield line
