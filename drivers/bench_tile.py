"""The kernels for CPUs against PyTorch's scaled_dot_product_attention, on one core.

    pip install -e '.[bench]'  # torch; its CPU build is enough
    python drivers/bench_tile.py --trials 9 --output data/results/tiles.h5
    python drivers/bench_tile.py --shapes 16x16x16,64x16x16,256x8x64 --trials 301
    OPENBLAS_CORETYPE=Haswell python drivers/bench_tile.py  # as if the CPU were another
    python drivers/bench_tile.py --masks all  # without torch

All run in this process, in turn, trial by trial, single-threaded, float32; the backward pass is
timed against torch's autograd.  Prints GFLOP/s (4 operations per pair, head and element forward,
10 backward; masked pairs are not counted) as the median over the trials, and the median of the
ratios: of the kernel "numpy", of "numba" where Numba is installed, and of the latter with the
shortcut for moderate logits turned off, "general".  --output adds the seconds of all trials to a
benchmark file, with CPU, BLAS, the CPU that it takes this one for, and versions;
``plot.py --what tiles`` draws it.

With --masks: nanoseconds of CPU time that the kernel takes for each visible pair and head
under these masks, and their ratio to the full mask's, of up to 2048 queries, in turn.
Exit code 1: a result is wrong.  2: bad input, or torch is missing.
"""

import argparse

from a2d_mpi.experiments.bench_tile import bench_tile, shapes
from a2d_mpi.experiments.options import TRIALS, Parser, masks, path, run_serial, utf8

SHAPES, SHAPES_OF_MASKS = "4096x4x128,8192x2x64", "16384x8x64"


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("bench_tile.py", __doc__)
    parser.add_argument("--trials", type=TRIALS, default=7)
    parser.add_argument(
        "--shapes",
        type=shapes,
        help=f"seqlen x heads x headdim, separated by commas (default {SHAPES}; "
        f"with --masks {SHAPES_OF_MASKS})",
    )
    parser.add_argument("--output", type=path, help="HDF5 file that the seconds are added to")
    parser.add_argument("--name", type=utf8, help="of the figures; default: CPU and BLAS")
    parser.add_argument("--masks", type=masks, help="names of masks, separated by commas, or all")
    return parser


def bench(args: argparse.Namespace) -> int:
    """Run the benchmark that the options ask for; returns the exit code."""
    args.shapes = args.shapes or shapes(SHAPES_OF_MASKS if args.masks else SHAPES)
    if not args.masks:
        return bench_tile(args)
    from a2d_mpi.experiments.bench_masks import bench_masks

    return bench_masks(args)


if __name__ == "__main__":
    run_serial(build_parser, bench)
