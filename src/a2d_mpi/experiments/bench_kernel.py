"""The program of `drivers/bench.py kernels`: kernels and torch's attention side by side."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import ModuleType

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi.comm.agreement import agree
from a2d_mpi.core import reference
from a2d_mpi.core.config import PHASES, AttentionConfig
from a2d_mpi.core.dtypes import as_dtype, compute_dtype
from a2d_mpi.core.sizes import flops, parse_count
from a2d_mpi.devices.host import HOST
from a2d_mpi.devices.protocol import Device
from a2d_mpi.experiments.benchmark import in_turn, report, within
from a2d_mpi.experiments.check import samples
from a2d_mpi.experiments.cli import together
from a2d_mpi.experiments.files import Check
from a2d_mpi.experiments.hdf5 import check_output
from a2d_mpi.experiments.measure import open_device
from a2d_mpi.experiments.options import SAMPLE, BadOption
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.experiments.results import BENCHMARK_SCHEMA, extend_file, kernel_speeds
from a2d_mpi.experiments.streams import progress
from a2d_mpi.kernels import check_kernel, make_kernel
from a2d_mpi.kernels.protocol import Kernel
from a2d_mpi.masks.intervals import Intervals
from a2d_mpi.masks.mask import Mask
from a2d_mpi.masks.patterns import make_mask

MASKS = ("full", "causal")  # masks that torch has
# Largest errors relative to the largest value of a tensor.
BOUNDS = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
COLUMNS = ("shape/mask", "phase", "kernel", "GFLOP/s", "of torch's")
# Shapes, dtype and kernels by device.
DEFAULTS = {
    "cpu": ([(4096, 4, 128), (8192, 2, 64)], "float32", ["numpy", "auto"]),
    "gpu": ([(16384, 16, 128)], "bfloat16", ["auto"]),
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
    """Check and time the kernels of each shape and mask; return the exit code."""
    wrong = f"kernels are timed in one process, got {comm.size}"
    agree(comm, wrong if comm.size > 1 else None)
    return together(comm, lambda: _bench_kernel(args))


def _bench_kernel(args: argparse.Namespace) -> int:
    for name, value in zip(("shapes", "dtype", "kernels"), DEFAULTS[args.device]):
        if getattr(args, name) is None:
            setattr(args, name, value)
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
    checks = {}
    print("{device}, {dtype}; {blas}, 1 thread; numpy {numpy_version}".format(**times, **origin))
    with threadpool_limits(1):
        for config, text, mask in progress(problems, desc="workloads"):
            sizes = config.seqlen, config.seqlen, config.nheads, config.nheads_kv, config.headdim
            tile, calls = RandomTile(*sizes, mask, args.dtype, device), {}
            of = f"{config.seqlen}x{config.nheads}x{config.headdim}/{text}"
            for kernel in (_kernel(name, tile) for name in args.kernels):
                by_phase = tile.calls(kernel)
                for phase in PHASES:
                    by_phase[phase]()
                checks[f"{of}, {kernel.name}"] = tile.checks()
                calls |= {f"{phase}/{kernel.name}": by_phase[phase] for phase in PHASES}
            if torch is not None and text in MASKS:
                calls |= _torch_calls(torch, tile, text == "causal")
            seconds = in_turn(calls, args.trials, device=device)
            times |= {f"{of}/{call}": x for call, x in seconds.items()}
            for phase in PHASES:
                work = flops(tile.area, config.nheads, config.headdim, phase == "backward")
                times[f"tflop/{of}/{phase}"] = work / 1e12
    times["right"] = all(x.passed for of_run in checks.values() for x in of_run.values())
    if args.output:
        name = args.name or f"{origin['device']}, {origin['blas']}"
        extend_file(args.output, BENCHMARK_SCHEMA, {"figures": {name.replace("/", " "): times}})
    return report(MPI.COMM_SELF, [COLUMNS, *_speeds(times)], checks)


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
    """Return calls of torch on the same numbers, by phase."""
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

    attend = torch.nn.functional.scaled_dot_product_attention

    def forward() -> None:
        with torch.no_grad():
            attend(*qkv, **options)
        wait()

    out = attend(*qkv, **options)

    def backward() -> None:
        for x in qkv:
            x.grad = None
        out.backward(dout, retain_graph=True)
        wait()

    return {"forward/torch": forward, "backward/torch": backward}


def _speeds(times: dict[str, object]) -> Iterator[list[str]]:
    """Yield a row of the table for each shape, mask, phase and implementation: median speeds."""
    for group, here in kernel_speeds(times).items():
        shape, mask, phase = group.split("/")
        for name, speed in here.items():
            of_torch = f"{speed / here['torch']:.3f}" if "torch" in here else ""
            yield [f"{shape}/{mask[:40]}", phase, name, f"{1e3 * speed:.4g}", of_torch]


class RandomTile:
    """Random tensors of a tile, and arrays for a kernel's results.

    Parameters
    ----------
    nq, nk : int
        Number of queries and keys; the tokens of both begin at 0.
    nheads, nheads_kv, headdim : int
    mask : Mask
    dtype : str
        Storage dtype.
    device : Device

    Attributes
    ----------
    q, dout : (nq, nheads, headdim) dtype
    k, v : (nk, nheads_kv, headdim) dtype
    out : (nq, nheads, headdim) dtype
    lse, delta : (nq, nheads) accumulation dtype
    gradients : list of array
        dq, dk and dv.
    area : int
        Visible pairs.
    """

    def __init__(
        self,
        nq: int,
        nk: int,
        nheads: int,
        nheads_kv: int,
        headdim: int,
        mask: Mask,
        dtype: str = "float32",
        device: Device = HOST,
    ) -> None:
        rng, storage = np.random.default_rng(0), as_dtype(dtype)
        queries, keys = (nq, nheads, headdim), (nk, nheads_kv, headdim)
        self.q, self.dout, self.k, self.v = (
            device.upload(rng.standard_normal(shape).astype(storage))
            for shape in (queries, queries, keys, keys)
        )
        self.device, self.mask, self._tokens = device, mask, (np.arange(nq), np.arange(nk))
        self.intervals = Intervals.of(mask.intervals(*self._tokens))
        self.area = mask.area(*self._tokens)
        self.out = device.empty(queries, storage)
        self.lse = device.empty((nq, nheads), compute_dtype(storage))
        self.gradients = [device.empty(x, storage) for x in (queries, keys, keys)]

    @property
    def softmax_scale(self) -> float:
        """Scale of logits: 1 / sqrt(headdim)."""
        return self.q.shape[-1] ** -0.5

    def forward(self, kernel: Kernel) -> None:
        """Compute out and lse."""
        kernel.forward(self.q, self.k, self.v, self.intervals, self.out, self.lse)

    def backward(self, kernel: Kernel) -> None:
        """Compute delta and the gradients; autograd computes delta in its backward pass, too."""
        self.delta = self.device.delta(self.dout, self.out)
        given = self.dout, self.q, self.k, self.v, self.lse, self.delta, self.intervals
        kernel.backward(*given, *self.gradients, fresh=True)

    def calls(self, kernel: Kernel) -> dict[str, Callable[[], None]]:
        """Return the calls of a kernel by phase; a backward call needs a forward call before."""
        return {
            "forward": partial(self.forward, kernel),
            "backward": partial(self.backward, kernel),
        }

    def checks(self) -> dict[str, Check]:
        """Compare a sample of the rows of out, dq, dk and dv with float64."""
        names = ("q", "k", "v", "dout", "out", "lse", "delta")
        q, k, v, dout, out, lse, delta = (self.device.download(getattr(self, x)) for x in names)
        dq, dk, dv = map(self.device.download, self.gradients)
        queries, keys = (np.concatenate(samples(len(x), SAMPLE, 1)) for x in (q, k))
        scale, seen = self.softmax_scale, self.mask.dense(queries, self._tokens[1])
        exact, exact_lse = reference.attention(q[queries], k, v, seen, scale)
        given = dout[queries], q[queries], k, v, exact_lse
        exact_dq, _, _ = reference.attention_backward(*given, delta[queries], seen, scale)
        seen = self.mask.dense(self._tokens[0], keys)
        given = dout, q, k[keys], v[keys], lse, delta
        _, exact_dk, exact_dv = reference.attention_backward(*given, seen, scale)
        bound = BOUNDS[q.dtype.name]
        return {
            "out": within(bound, out[queries], exact),
            "dq": within(bound, dq[queries], exact_dq),
            "dk": within(bound, dk[keys], exact_dk),
            "dv": within(bound, dv[keys], exact_dv),
        }
