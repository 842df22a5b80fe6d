"""The program of `drivers/bench.py kernels`: kernels and torch's attention side by side."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.attention.methods import Attention2D
from a2d_mpi.checks.check import check_attention
from a2d_mpi.checks.measure import open_device, origin_of, random_inputs
from a2d_mpi.checks.timing import in_turn, kernel_calls, report
from a2d_mpi.cli.options import SAMPLE, Parser, add_options, form, listed, log, one_of, progress
from a2d_mpi.cli.run import together
from a2d_mpi.cli.workloads import add_list
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.comm.roots import errors_of
from a2d_mpi.core.config import PHASES
from a2d_mpi.core.sizes import flops, parse_count
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.kernels import make_kernel
from a2d_mpi.masks.patterns import make_mask
from a2d_mpi.results.hdf5 import BENCHMARK_SCHEMA, check_output, extend_file
from a2d_mpi.results.tables import kernel_speeds

MASKS = ("full", "causal")  # masks that torch has
BACKENDS = {  # of torch's attention, by their names in torch
    "default": None,
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
COLUMNS = ("shape/mask", "phase", "kernel", "GFLOP/s", "of torch's")
# Shapes, dtype and kernels by device.
DEFAULTS = {
    "cpu": ([(4096, 4, 128), (8192, 2, 64)], "float32", ["numpy", "auto"]),
    "gpu": ([(16384, 16, 128)], "bfloat16", ["auto"]),
}
# An option that is a shape: seqlen, heads and headdim.
shape = form(
    "like 4096x4x128",
    r"(\d{1,9}[KMG]?)x(\d{1,9})x(\d{1,9})",
    lambda *sizes: tuple(map(parse_count, sizes)),
)


def kernels(parser: Parser) -> Callable:
    """Compare kernels with PyTorch's scaled_dot_product_attention, in one process.

        python -m a2d_mpi bench kernels --shapes 512x2x64 --trials 3
        python -m a2d_mpi bench kernels --trials 9 --output data/results/tiles.h5
        python -m a2d_mpi bench kernels --shapes 16384x8x64 --masks full,sliding_window
        python -m a2d_mpi bench kernels --device gpu --masks full,sliding_window_causal:4096
        OPENBLAS_CORETYPE=Haswell python -m a2d_mpi bench kernels  # as if the CPU were another

    To compare with PyTorch: pip install -e '.[bench]'; on CPUs its build for CPUs is enough.

    All kernels run in turn, trial by trial.  On a CPU these are "numpy" and the fastest kernel for
    the dtype, on one core.  On a GPU it is the fastest kernel that is installed.  For the masks
    that torch has, its attention runs too, by the backend that torch chooses or by those of
    --torch.  The backward pass is timed against torch's autograd.

    The table has FLOP/s in the median over the trials: 4 operations per pair, head and element
    forward, and 10 backward.  Masked pairs are not counted.  It also has the ratios to torch.
    --output adds the seconds of all trials to a benchmark file, with versions, the CPU or GPU,
    BLAS, and the CPU that BLAS takes this CPU for.  "plot results FILE PICTURE --what kernels"
    draws the file.
    """
    group = parser.add_argument_group("workloads and kernels")
    add = group.add_argument
    add_options(group, "device", help="where the kernels run")
    text = "SEQLENxNHEADSxHEADDIM; default: 4096x4x128,8192x2x64 or, on a GPU, 16384x16x128"
    add("--shapes", type=listed(shape), metavar="SHAPE,...", help=text)
    add_options(group, "nheads-kv", help="KV heads of all shapes; default: as many as query heads")
    add_list(group, "masks", "mask", default=",".join(MASKS))
    text = "storage dtype; default: float32 or, on a GPU, bfloat16"
    add_options(group, "dtype", default=None, help=text)
    text = "names in a2d_mpi.kernels.KERNELS; default: numpy,auto or, on a GPU, auto"
    add("--kernels", type=listed(str), metavar="KERNEL,...", help=text)
    text = f"backends of torch's attention: {', '.join(BACKENDS)}"
    options = {"type": listed(one_of(BACKENDS)), "metavar": "BACKEND,...", "help": text}
    add("--torch", default=["default"], **options)
    group = parser.add_argument_group("measurement and output")
    add_options(group, "trials")
    add_options(group, "output", help="HDF5 file to which the seconds are added")
    text = "name of the results in the file; default: CPU or GPU, and BLAS"
    group.add_argument("--name", metavar="TEXT", help=text)
    return bench_kernel


def bench_kernel(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Check and time the kernels of each shape and mask; return the exit code."""
    return together(comm, lambda: _bench_kernel(comm.size, args))


def _bench_kernel(ranks: int, args: argparse.Namespace) -> int:
    if ranks > 1:
        raise ValueError(f"kernels are timed in one process, got {ranks}")
    for name, value in zip(("shapes", "dtype", "kernels"), DEFAULTS[args.device]):
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_output(args.output, BENCHMARK_SCHEMA)
    grid, plans = ProcessGrid(MPI.COMM_SELF, 1, 1), {}
    # The plans check all options before the first kernel runs.  Later they say what is right.
    for (seqlen, nheads, headdim), text in product(args.shapes, args.masks):
        sizes = {"seqlen": seqlen, "nheads": nheads, "headdim": headdim}
        sizes |= {"nheads_kv": args.nheads_kv, "dtype": args.dtype}
        mask, of = make_mask(text, seqlen), f"{seqlen}x{nheads}x{headdim}/{text}"
        plans[of] = [Attention2D(grid, mask, **sizes, kernel=x) for x in args.kernels]
    device = open_device(MPI.COMM_SELF, args.device)
    if device is HOST and hasattr(os, "sched_setaffinity"):  # to one core
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch = _torch(device)
    origin = origin_of(MPI.COMM_SELF, device)
    times: dict[str, object] = {
        "origin": origin,
        "threads": 1,
        "trials": args.trials,
        "dtype": args.dtype,
        "torch": str(torch.__version__) if torch else "none",
    }
    checks = {}
    print("{device}, {dtype}; {blas}, 1 thread; numpy {numpy_version}".format(**times, **origin))
    with threadpool_limits(1):
        for of, (plan, *_) in progress(plans.items(), desc="workloads"):
            inputs, calls = random_inputs(plan, backward=True), {}
            t = {name: device.upload(x) for name, x in inputs.items()}
            for name in args.kernels:
                with errors_of(MPI.COMM_SELF, 0, ImportError):
                    kernel = make_kernel(name, device, plan.dtype, plan.softmax_scale)
                if kernel.why:
                    log.info("%s is %s: %s", name, kernel.name, kernel.why)
                by_phase = kernel_calls(kernel, plan.mask, t, device)
                for phase, call in by_phase.items():
                    call()
                    calls[f"{phase}/{kernel.name}"] = call
                for phase, other in getattr(kernel, "fallbacks", ()):
                    log.info("%s: %s leaves blocks of %s to %s", of, kernel.name, phase, other)
                results = {name: device.download(x) for name, x in t.items()}
                checks[f"{of}, {kernel.name}"] = check_attention(plan, results, SAMPLE)
            if torch is not None and of.rpartition("/")[2] in MASKS:
                for backend in args.torch:
                    try:
                        calls |= _torch_calls(torch, t, of.endswith("causal"), device, backend)
                    except RuntimeError as error:
                        reason = str(error).partition("\n")[0]
                        log.info("torch's attention by %s does not run: %s", backend, reason)
            seconds = in_turn(calls, args.trials, device=device)
            times |= {f"{of}/{call}": x for call, x in seconds.items()}
            for phase in PHASES:
                work = flops(plan.area(), plan.nheads, plan.headdim, phase == "backward")
                times[f"tflop/{of}/{phase}"] = work / 1e12
    times["right"] = all(x.passed for of_run in checks.values() for x in of_run.values())
    if args.output:
        kind = "" if args.dtype == "float32" else f", {args.dtype}"
        name = args.name or f"{origin['device']}, {origin['blas']}{kind}"
        extend_file(args.output, BENCHMARK_SCHEMA, {"figures": {name.replace("/", " "): times}})
    return report(MPI.COMM_SELF, [COLUMNS, *_speeds(times)], checks)


def _torch(device: Device) -> ModuleType | None:
    """Return the module torch; print why and return None if there is nothing to compare with."""
    try:
        import torch
    except ImportError:
        log.info("torch is not installed, so kernels are not compared with it")
        return None
    if device is HOST:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():  # torch may be built for CPUs only
        log.info("torch has no GPU, so kernels are not compared with it")
        return None
    return torch


def _torch_calls(
    torch: ModuleType, t: dict[str, Array], causal: bool, device: Device, backend: str
) -> dict[str, Callable[[], None]]:
    """Return calls of torch on the same numbers, by phase; one of `BACKENDS` computes."""
    given = [t[name] for name in ("q", "k", "v", "dout")]
    dtype = getattr(torch, given[0].dtype.name)
    options = {"is_causal": causal}
    if given[0].shape[1] != given[1].shape[1]:
        options["enable_gqa"] = True
    # As integers, because NumPy and CuPy cannot export bfloat16.
    tensors = (torch.from_dlpack(x.view(f"i{x.dtype.itemsize}")).view(dtype) for x in given)
    # (batch, heads, tokens, headdim), contiguous: torch's fastest layout.
    *qkv, dout = (x.transpose(0, 1)[None].contiguous() for x in tensors)
    for x in qkv:
        x.requires_grad_()
    wait = (lambda: None) if device is HOST else torch.cuda.synchronize

    name, chosen = "torch", nullcontext
    if BACKENDS[backend]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        name = f"torch-{backend}"
        chosen = partial(sdpa_kernel, getattr(SDPBackend, BACKENDS[backend]))

    def attend() -> Any:
        with chosen():
            return torch.nn.functional.scaled_dot_product_attention(*qkv, **options)

    def forward() -> None:
        with torch.no_grad():
            attend()
        wait()

    out = attend()

    def backward() -> None:
        for x in qkv:
            x.grad = None
        out.backward(dout, retain_graph=True)
        wait()

    return {f"forward/{name}": forward, f"backward/{name}": backward}


def _speeds(times: dict[str, object]) -> Iterator[list[str]]:
    """Yield a row of the table for each shape, mask, phase and implementation: median speeds."""
    for group, here in kernel_speeds(times).items():
        shape, mask, phase = group.split("/")
        for name, speed in here.items():
            share = f"{speed / here['torch']:.3f}" if "torch" in here else ""
            yield [f"{shape}/{mask[:40]}", phase, name, f"{1e3 * speed:.4g}", share]
