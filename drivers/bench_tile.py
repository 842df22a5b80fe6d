"""The NumPy tile kernel against PyTorch's CPU scaled_dot_product_attention, on one core.

    pip install -e '.[bench]'  # torch; its CPU build is enough
    python drivers/bench_tile.py
    python drivers/bench_tile.py --shapes 16x16x16,64x16x16 --trials 300

Both run in this process, in turn, trial by trial, single-threaded, float32; the backward pass is
timed against torch's autograd.  Prints GFLOP/s (4 operations per pair, head and element forward,
10 backward; masked pairs are not counted) as the median over the trials, and the median of the
ratios.  "general" is our kernel with the shortcut for moderate logits turned off.
Exit code 1: a result is wrong.  2: bad input, or torch is missing.
"""

from __future__ import annotations

import os
import time

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from a2d_mpi.core.masks import MASKS
from a2d_mpi.core.sizes import check_room, check_sizes, flops
from a2d_mpi.devices.host import HOST
from a2d_mpi.experiments.options import TRIALS, BadOption, Parser, run_serial
from a2d_mpi.kernels.numpy import NumpyKernel

SHAPES = "4096x4x128,8192x2x64"


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser(prog="bench_tile.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--trials", type=TRIALS, default=7)
    parser.add_argument(
        "--shapes",
        type=shapes,
        default=shapes(SHAPES),
        help=f"seqlen x heads x headdim, separated by commas (default {SHAPES})",
    )
    return parser


def shapes(text: str) -> list[tuple[int, int, int]]:
    """Seqlen, heads and headdim of each shape; BadOption if they are no such list."""
    found = []
    for shape in text.split(","):
        try:
            seqlen, nheads, headdim = map(int, shape.split("x"))
            check_sizes(seqlen=seqlen, nheads=nheads, nheads_kv=nheads, headdim=headdim)
            check_room(seqlen, nheads, nheads, headdim, 4, 1)
        except ValueError as error:
            raise BadOption(f"must be like {SHAPES}, got {shape[:40]!r}: {error}") from None
        found.append((seqlen, nheads, headdim))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = build_parser().parse_args(argv)
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
            for mask in MASKS:
                rates_of, looks, error = compare(torch, seqlen, heads, headdim, mask, args.trials)
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


def compare(torch, seqlen: int, nheads: int, headdim: int, mask_name: str, trials: int):
    """GFLOP/s of every trial by pass and implementation, shares of looking for NaN, and the
    largest difference.
    """
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((seqlen, nheads, headdim), np.float32) for _ in range(4))
    # torch takes (batch, heads, tokens, headdim); contiguous, its fastest layout.
    theirs = [torch.from_numpy(x).transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    for x in theirs:
        x.requires_grad_()
    their_dout = torch.from_numpy(dout).transpose(0, 1)[None].contiguous()
    causal = mask_name == "causal"
    mask, tokens = MASKS[mask_name](), np.arange(seqlen)
    intervals = mask.intervals(tokens, tokens)
    tiles = {name: NumpyKernel(np.float32, headdim**-0.5) for name in ("ours", "general")}
    tiles["general"]._bounded = lambda *_: False
    out, lse = np.empty_like(q), np.empty((seqlen, nheads), np.float32)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    seconds = {name: {"torch": [], "ours": [], "general": []} for name in ("forward", "backward")}
    looked_at = {"forward": (q, k, v), "backward": (dout, q, k, v, out)}
    looks = {name: [] for name in looked_at}

    def timed(into: list[float], action, *args):
        start = time.perf_counter()
        result = action(*args)
        into.append(time.perf_counter() - start)
        return result

    for _ in range(trials + 1):
        with torch.no_grad():
            timed(seconds["forward"]["torch"], lambda: sdpa(*theirs, is_causal=causal))
        for x in theirs:
            x.grad = None
        their_out = sdpa(*theirs, is_causal=causal)
        timed(seconds["backward"]["torch"], their_out.backward, their_dout)
        for name, tile in tiles.items():
            timed(seconds["forward"][name], tile.forward, q, k, v, intervals, out, lse)
            for x in gradients:
                x[...] = 0

            def backward(tile=tile):
                # delta belongs to the backward pass: autograd computes it too.
                delta = np.einsum("thd,thd->th", dout, out)
                tile.backward(dout, q, k, v, lse, delta, intervals, *gradients)

            timed(seconds["backward"][name], backward)
        for name, arrays in looked_at.items():
            timed(looks[name], lambda arrays=arrays: [HOST.finite(x) for x in arrays])
    error = max(
        np.abs(a - b.detach().numpy()[0].transpose(1, 0, 2)).max()
        for a, b in zip((out, *gradients), (their_out, *(x.grad for x in theirs)))
    )
    work = {
        name: flops(mask.area(tokens, tokens), nheads, headdim, name == "backward") / 1e9
        for name in seconds
    }
    rates = {  # the first trial warms up
        name: {who: work[name] / np.array(times[1:]) for who, times in by.items()}
        for name, by in seconds.items()
    }
    shares = {
        name: float(np.median(np.array(times) / seconds[name]["ours"]))
        for name, times in looks.items()
    }
    return rates, shares, error


if __name__ == "__main__":
    run_serial("bench_tile.py", main)
