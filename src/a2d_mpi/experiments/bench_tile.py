"""The table of drivers/bench_tile.py, and what bench_gpu.py shares with it; no MPI import."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
from threadpoolctl import threadpool_limits

from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.sizes import flops
from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.benchmark import SCHEMA, KernelTimes, add_kernel_times
from a2d_mpi.experiments.hdf5 import check_output
from a2d_mpi.experiments.options import BadOption
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.experiments.tile import Tile
from a2d_mpi.experiments.timing import in_turn
from a2d_mpi.kernels import make_kernel
from a2d_mpi.masks.patterns import make_mask

MASKS = ("full", "causal")  # that torch has
BOUND = 1e-4  # largest error of out and the gradients, float32


def shapes(text: str) -> list[tuple[int, int, int]]:
    """Seqlen, heads and headdim of each shape; BadOption if they are no such list."""
    found = []
    for shape in text.split(","):
        try:
            seqlen, nheads, headdim = map(int, shape.split("x"))
            AttentionConfig(seqlen, nheads, headdim).check_room(1)
        except ValueError as error:
            raise BadOption(
                f"must be like 4096x4x128,8192x2x64, got {shape[:40]!r}: {error}"
            ) from None
        found.append((seqlen, nheads, headdim))
    return found


def bench_tile(args: argparse.Namespace) -> int:
    """Print a line for each shape, mask, phase and kernel; returns the exit code."""
    if args.output:
        check_output(args.output, SCHEMA)
    torch = find_torch()
    modules = [x for x in ("numpy", "numba", "torch") if find_spec(x)]
    about: dict[str, object] = {
        **provenance("none", [socket.gethostname()]),
        "threads": 1,
        "trials": args.trials,
        "dtype": "float32",
        **{x: version(x) for x in modules},
    }
    if torch is not None:
        torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        # One and the same core for all.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    times, right = KernelTimes(about, {}), True
    with threadpool_limits(1):
        print("{device}, 1 thread, float32; {blas}; numpy {numpy}".format(**about))
        for seqlen, nheads, headdim in args.shapes:
            for mask in args.masks:
                tile = Tile(seqlen, seqlen, nheads, nheads, headdim, make_mask(mask, seqlen))
                calls, error = {}, 0.0
                for name in (x for x in modules if x != "torch"):
                    kernel = make_kernel(name, HOST, tile.q.dtype, tile.softmax_scale)
                    calls |= {f"{x}/{name}": call for x, call in tile.calls(kernel).items()}
                    for x in PHASES:
                        calls[f"{x}/{name}"]()
                    error = float(np.max([error, tile.error()]))  # NaN stays
                if torch is not None and mask in MASKS:
                    tensors = map(torch.from_numpy, (tile.q, tile.k, tile.v, tile.dout))
                    theirs = torch_calls(torch, *tensors, mask == "causal")
                    calls |= {f"{x}/torch": call for x, call in theirs.items()}
                of = f"{seqlen}x{nheads}x{headdim}/{mask}"
                times.seconds |= {f"{of}/{x}": y for x, y in in_turn(calls, args.trials).items()}
                for phase in PHASES:
                    work = flops(tile.area, nheads, headdim, phase == "backward")
                    about[f"tflop/{of}/{phase}"] = work / 1e12
                print_speeds(times, of)
                if not error < BOUND:
                    right = False
                    print(f"{of}: results are WRONG by {error:.1e}", flush=True)
    if args.output:
        name = args.name or f"{about['device']}, {about['blas']}"
        about["right"] = right
        add_kernel_times(args.output, name.replace("/", " "), times)
    return int(not right)


def find_torch():
    """The module torch; None, and a line that says so, if it is not installed."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: nothing to compare with")
        return None
    return torch


def print_speeds(times: KernelTimes, of: str) -> None:
    """Print a line for each phase and implementation of a mask.

    The speed in the median, and its ratios to that under the full mask, if this was timed before,
    and to that of torch's fastest backend.

    Parameters
    ----------
    times : KernelTimes
        Calls are "mask/phase/implementation", perhaps with "shape/" before it.
    of : str
        "mask", or "shape/mask".
    """
    *shape, mask = of.split("/")
    for phase in PHASES:
        speeds = {x: _speeds(times, "/".join([*shape, x, phase])) for x in (mask, "full")}
        torch = max((x for y, x in speeds[mask].items() if y.startswith("torch")), default=None)
        for name, speed in speeds[mask].items():
            unit, size = ("TFLOP/s", 1) if speed >= 1 else ("GFLOP/s", 1e-3)
            line = f"{'/'.join([*shape, mask[:40]]):<30} {phase:<8} {name:<12}"
            line += f"{speed / size:7.4g} {unit}"
            if mask != "full" and name in speeds["full"]:
                line += f"   of the full mask's {speed / speeds['full'][name]:.2f}"
            if torch and not name.startswith("torch"):
                line += f"   of torch's {speed / torch:.3f}"
            print(line, flush=True)


def _speeds(times: KernelTimes, group: str) -> dict[str, float]:
    """TFLOP/s by implementation, in the median."""
    found = {x.removeprefix(f"{group}/"): y for x, y in times.seconds.items()
             if x.startswith(f"{group}/")}  # fmt: skip
    return {x: times.attributes[f"tflop/{group}"] / float(np.median(y)) for x, y in found.items()}


def torch_calls(
    torch, q, k, v, dout, causal: bool, backend=nullcontext, then=lambda: None, **options: object
) -> dict[str, Callable]:
    """The phases of torch's attention of (tokens, heads, headdim).

    `backend` makes the context of a call, `then` ends what is timed.
    """
    # (batch, heads, tokens, headdim), contiguous: its fastest layout.
    *given, dout = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v, dout))
    for x in given:
        x.requires_grad_()

    def attend():
        with backend():
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return sdpa(*given, is_causal=causal, **options)

    def forward():
        with torch.no_grad():
            attend()
        then()

    def backward():
        for x in given:
            x.grad = None
        out.backward(dout, retain_graph=True)
        then()

    out = attend()
    return {"forward": forward, "backward": backward}
