"""The table of drivers/bench_tile.py --masks: time of the NumPy kernel per visible pair."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_limits

from a2d_mpi.core import reference
from a2d_mpi.core.intervals import keys_per_query
from a2d_mpi.core.masks import Full, Mask
from a2d_mpi.core.patterns import make_mask
from a2d_mpi.experiments.timing import turns
from a2d_mpi.kernels.numpy import NumpyKernel

ROWS = 2048  # queries of the full mask: all of a long sequence would take minutes
SAMPLE = 8  # queries whose results are checked
BOUND = 1e-4  # largest error of their out


def bench_masks(args: argparse.Namespace) -> int:
    """Print a line for each shape and mask; returns the exit code."""
    wrong = False
    with threadpool_limits(1):
        print("seqlen heads headdim mask                     visible     forward    backward"
              "    ratio to full")  # fmt: skip
        for seqlen, nheads, headdim in args.shapes:
            for text in args.masks:
                figures, error = _compare(make_mask(text, seqlen), seqlen, nheads, headdim, args)
                wrong |= not error < BOUND
                share, times, ratios = figures
                print(
                    f"{seqlen:6} {nheads:5} {headdim:7} {text:<24} {100 * share:6.2f} %"
                    + "".join(f"{1e9 * x:9.2f} ns" for x in times)
                    + "".join(f"{x:8.2f}" for x in ratios)
                    + f"  WRONG by {error:.1e}" * (not error < BOUND),
                    flush=True,
                )
    return int(wrong)


def _compare(
    mask: Mask, seqlen: int, nheads: int, headdim: int, args: argparse.Namespace
) -> tuple[tuple[float, list[float], list[float]], float]:
    """Share of visible pairs, seconds per pair and head by phase, and their ratios to the full
    mask's, medians over the trials; and the largest error of a sample of out.
    """
    rng, tokens = np.random.default_rng(0), np.arange(seqlen)
    q, k, v, dout = (rng.standard_normal((seqlen, nheads, headdim), np.float32) for _ in range(4))
    out, lse = np.zeros_like(q), np.zeros((seqlen, nheads), np.float32)
    gradients = [np.empty_like(q) for _ in range(3)]
    calls: dict[tuple[str, str], Callable] = {}
    pairs, kernel = {}, NumpyKernel(np.float32, headdim**-0.5)
    # The mask first: the backward pass of either is given its lse.
    for name, shown, n in (("mask", mask, seqlen), ("full", Full(), min(ROWS, seqlen))):
        intervals = shown.intervals(tokens[:n], tokens)
        pairs[name] = nheads * int(keys_per_query(intervals).sum())
        results = (out, lse) if name == "mask" else (out[:n].copy(), lse[:n].copy())

        def forward(intervals=intervals, n=n, results=results):
            kernel.forward(q[:n], k, v, intervals, *results)

        def backward(intervals=intervals, n=n, results=results):
            o, s = results
            delta = np.einsum("thd,thd->th", dout[:n], o)
            dq, dk, dv = gradients
            kernel.backward(
                *(dout[:n], q[:n], k, v, s, delta, intervals, dq[:n], dk, dv), fresh=True
            )

        calls |= {("forward", name): forward, ("backward", name): backward}
    seconds: dict[tuple[str, str], list[float]] = {x: [] for x in calls}
    for call in calls.values():  # buffers and cache blocks are made
        call()
    for name in turns(list(calls), args.trials):
        start = time.thread_time()  # others may use the core
        calls[name]()
        seconds[name].append((time.thread_time() - start) / max(1, pairs[name[1]]))
    times = [float(np.median(seconds[phase, "mask"])) for phase in ("forward", "backward")]
    ratios = [
        float(np.median(np.divide(seconds[phase, "mask"], seconds[phase, "full"])))
        for phase in ("forward", "backward")
    ]
    rows = np.unique(rng.integers(0, seqlen, SAMPLE))
    exact, _ = reference.attention(q[rows], k, v, mask.dense(rows, tokens), headdim**-0.5)
    return (
        (pairs["mask"] / nheads / seqlen**2, times, ratios),
        float(np.abs(out[rows] - exact).max(initial=0)),
    )
