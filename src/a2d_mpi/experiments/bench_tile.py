"""The table of drivers/bench_tile.py; no MPI import."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.patterns import make_mask
from a2d_mpi.core.sizes import flops
from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.options import BadOption
from a2d_mpi.experiments.timing import in_turn
from a2d_mpi.kernels.numpy import NumpyKernel


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
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        # One and the same core for both.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    wrong = False
    with threadpool_limits(1):
        blas = {f"{x['internal_api']} {x['version']} ({x.get('architecture')})"
                for x in threadpool_info() if x["user_api"] == "blas"}  # fmt: skip
        print(f"numpy {np.__version__} with {', '.join(blas)}; torch {torch.__version__}")
        print("seqlen heads headdim mask    pass      torch   ours  general   GFLOP/s"
              "    ours/torch general/torch")  # fmt: skip
        for seqlen, heads, headdim in args.shapes:
            for mask in ("full", "causal"):
                rates_of, looks, error = _compare(torch, seqlen, heads, headdim, mask, args.trials)
                wrong |= not error < 1e-4
                for name, rates in rates_of.items():
                    ours, general = (
                        np.median(rates[x] / rates["torch"]) for x in ("ours", "general")
                    )
                    figures = "".join(f"{np.median(x):8.1f}" for x in rates.values())
                    print(
                        f"{seqlen:6} {heads:5} {headdim:7} {mask:<7} {name:<8} {figures}"
                        f"{ours:20.2f} {general:13.2f}",
                        flush=True,
                    )
                shares = ", ".join(f"{100 * x:.2f} % of {name}" for name, x in looks.items())
                print(f"    largest difference of out and the gradients: {error:.1e}; "
                      f"a plan's look for NaN: {shares}")  # fmt: skip
    return int(wrong)


def _compare(
    torch, seqlen: int, nheads: int, headdim: int, mask_name: str, trials: int
) -> tuple[dict, dict, float]:
    """GFLOP/s of every trial by pass and implementation, shares of looking for NaN, and the
    largest difference.
    """
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((seqlen, nheads, headdim), np.float32) for _ in range(4))
    theirs = torch_calls(torch, *map(torch.from_numpy, (q, k, v, dout)), mask_name == "causal")
    mask, tokens = make_mask(mask_name, seqlen), np.arange(seqlen)
    intervals = mask.intervals(tokens, tokens)
    out, lse = np.empty_like(q), np.empty((seqlen, nheads), np.float32)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    looked_at = {"forward": (q, k, v), "backward": (dout, q, k, v, out)}
    calls = {(phase, "torch"): theirs[phase] for phase in looked_at}
    for name in ("ours", "general"):
        kernel = NumpyKernel(np.float32, headdim**-0.5)
        if name == "general":
            kernel._bounded = lambda *_: False

        def forward(kernel=kernel):
            kernel.forward(q, k, v, intervals, out, lse)

        def backward(kernel=kernel):
            # delta belongs to the backward pass: autograd computes it too.
            delta = np.einsum("thd,thd->th", dout, out)
            kernel.backward(dout, q, k, v, lse, delta, intervals, *gradients, fresh=True)

        calls |= {("forward", name): forward, ("backward", name): backward}
    for phase, arrays in looked_at.items():
        calls[phase, "look"] = lambda arrays=arrays: [HOST.finite(x) for x in arrays]
    seconds = in_turn(calls, trials)
    error = max(
        np.abs(a - b.detach().numpy()[0].transpose(1, 0, 2)).max()
        for a, b in zip((out, *gradients), theirs["results"]())
    )
    rates, shares = {}, {}
    for phase in looked_at:
        work = flops(mask.area(tokens, tokens), nheads, headdim, phase == "backward") / 1e9
        rates[phase] = {x: work / seconds[phase, x] for x in ("torch", "ours", "general")}
        shares[phase] = float(np.median(seconds[phase, "look"] / seconds[phase, "ours"]))
    return rates, shares, error


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
