"""The table of drivers/bench_tile.py; no MPI import."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
from threadpoolctl import threadpool_limits

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.patterns import make_mask
from a2d_mpi.core.sizes import flops
from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.benchmark import SCHEMA
from a2d_mpi.experiments.hdf5 import check_output
from a2d_mpi.experiments.kernel_plots import add_figures
from a2d_mpi.experiments.options import BadOption
from a2d_mpi.experiments.origin import provenance
from a2d_mpi.experiments.timing import in_turn
from a2d_mpi.kernels import make_kernel


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
    """Print a line for each shape, mask and phase; returns the exit code."""
    try:
        import torch
    except ImportError:
        raise ValueError("torch is missing: pip install -e '.[bench]'") from None
    if args.output:
        check_output(args.output, SCHEMA)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        # One and the same core for all.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    names = ["numpy", "numba"] if find_spec("numba") else ["numpy"]
    about: dict[str, object] = {
        **provenance("none", [socket.gethostname()]),
        "threads": 1,
        "trials": args.trials,
        "dtype": "float32",
        **{x: version(x) for x in ("numpy", "torch", *names[1:])},
    }
    seconds, wrong = {}, False
    with threadpool_limits(1):
        print("{device}, 1 thread; numpy {numpy} with {blas}; torch {torch}".format(**about))
        columns = ("torch", *names, "general")
        print("seqlen heads headdim mask    pass   ", *(f"{x:>7}" for x in columns),
              "  GFLOP/s; over torch's:", ", ".join(columns[1:]))  # fmt: skip
        for shape in args.shapes:
            for mask in ("full", "causal"):
                found, works, error = _compare(torch, shape, mask, args.trials, names)
                wrong |= not error < 1e-4
                for phase, work in works.items():
                    of = {x: found[phase, x] for x in columns}
                    _print_line((*shape, mask, phase), work, of)
                    group = f"{'x'.join(map(str, shape))}/{mask}/{phase}"
                    seconds |= {f"{group}/{x}": y for x, y in of.items()}
                    about[f"tflop/{group}"] = work / 1e12
                shares = (
                    f"{100 * np.median(found[x, 'look'] / found[x, names[-1]]):.2f} % of {x}"
                    for x in works
                )
                print(f"    largest difference of out and the gradients: {error:.1e}; "
                      f"a plan's look for NaN: {', '.join(shares)}")  # fmt: skip
    if args.output:
        name = args.name or f"{about['device']}, {about['blas']}"
        add_figures(args.output, name.replace("/", " "), about | {"right": not wrong}, seconds)
    return int(wrong)


def _print_line(what: tuple, work: int, seconds: dict[str, np.ndarray]) -> None:
    """GFLOP/s of torch and our kernels, and of the latter the medians of their ratios."""
    rates = (f"{work / 1e9 / np.median(x):7.1f}" for x in seconds.values())
    ratios = (f"{np.median(seconds['torch'] / x):6.2f}" for x in list(seconds.values())[1:])
    print("{:6} {:5} {:7} {:<7} {:<8}".format(*what), *rates, " " * 4, *ratios, flush=True)


def _compare(
    torch, shape: tuple[int, int, int], mask_name: str, trials: int, names: Sequence[str]
) -> tuple[dict, dict[str, int], float]:
    """Seconds of the trials by phase and kernel, FLOP by phase, and the largest difference.

    "general" is the last of the kernels without the shortcut for moderate logits, "look" a look
    for NaN.
    """
    seqlen, nheads, headdim = shape
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal(shape, np.float32) for _ in range(4))
    theirs = torch_calls(torch, *map(torch.from_numpy, (q, k, v, dout)), mask_name == "causal")
    mask, tokens = make_mask(mask_name, seqlen), np.arange(seqlen)
    intervals = mask.intervals(tokens, tokens)
    out, lse = np.empty_like(q), np.empty((seqlen, nheads), np.float32)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    right = [x.detach().numpy()[0].transpose(1, 0, 2) for x in _all_of(theirs)]
    looked_at = {"forward": (q, k, v), "backward": (dout, q, k, v, out)}
    calls = {(phase, "torch"): theirs[phase] for phase in looked_at}
    error = 0.0
    for name in (*names, "general"):
        kernel = make_kernel(
            names[-1] if name == "general" else name, HOST, q.dtype, headdim**-0.5
        )
        if name == "general":
            kernel._bounded = lambda *_: False

        def forward(kernel=kernel):
            kernel.forward(q, k, v, intervals, out, lse)

        def backward(kernel=kernel):
            # delta belongs to the backward pass: autograd computes it too.
            delta = np.einsum("thd,thd->th", dout, out)
            kernel.backward(dout, q, k, v, lse, delta, intervals, *gradients, fresh=True)

        forward(), backward()
        found = (np.abs(x - y).max() for x, y in zip((out, *gradients), right))
        error = float(np.max([error, *found]))  # NaN stays
        calls |= {("forward", name): forward, ("backward", name): backward}
    for phase, arrays in looked_at.items():
        calls[phase, "look"] = lambda arrays=arrays: [HOST.finite(x) for x in arrays]
    works = {
        phase: flops(mask.area(tokens, tokens), nheads, headdim, phase == "backward")
        for phase in looked_at
    }
    return in_turn(calls, trials), works, error


def _all_of(theirs: dict[str, Callable]) -> tuple:
    """Out and gradients by torch."""
    theirs["backward"]()
    return theirs["results"]()


def torch_calls(
    torch, q, k, v, dout, causal: bool, backend=nullcontext, then=lambda: None, **options: object
) -> dict[str, Callable]:
    """The phases of torch's attention of (tokens, heads, headdim), and their results.

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
    results = lambda: (out, *(x.grad for x in given))  # noqa: E731
    return {"forward": forward, "backward": backward, "results": results}
