"""The NumPy kernel against PyTorch's CPU scaled_dot_product_attention, on one core.

    pip install -e '.[bench]'  # torch; its CPU build is enough
    python drivers/bench_tile.py
    python drivers/bench_tile.py --shapes 16x16x16,64x16x16 --trials 300

Both run in this process, in turn, trial by trial, single-threaded, float32; the backward pass is
timed against torch's autograd.  Prints GFLOP/s (4 operations per pair, head and element forward,
10 backward; masked pairs are not counted) as the median over the trials, and the median of the
ratios.  "general" is our kernel with the shortcut for moderate logits turned off.
Exit code 1: a result is wrong.  2: bad input, or torch is missing.
"""

from a2d_mpi.experiments.bench_tile import bench_tile, shapes
from a2d_mpi.experiments.options import TRIALS, Parser, run_serial

SHAPES = "4096x4x128,8192x2x64"


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("bench_tile.py", __doc__)
    parser.add_argument("--trials", type=TRIALS, default=7)
    parser.add_argument(
        "--shapes",
        type=shapes,
        default=shapes(SHAPES),
        help=f"seqlen x heads x headdim, separated by commas (default {SHAPES})",
    )
    return parser


if __name__ == "__main__":
    run_serial(build_parser, bench_tile)
