"""The kernels for CPUs on one core, beside PyTorch's scaled_dot_product_attention.

    pip install -e '.[bench]'  # torch, to compare with; its build for CPUs is enough
    python drivers/bench_tile.py --trials 9 --output data/results/tiles.h5
    python drivers/bench_tile.py --shapes 16x16x16,64x16x16,256x8x64 --trials 301
    python drivers/bench_tile.py --shapes 16384x8x64 --masks full,sliding_window,causal_document
    OPENBLAS_CORETYPE=Haswell python drivers/bench_tile.py  # as if the CPU were another

All kernels run in this process, in turn, trial by trial, single-threaded, float32: "numpy",
"numba" where Numba is installed, and torch for the masks that it has.  The backward pass is timed
against torch's autograd.  Prints GFLOP/s in the median over the trials (4 operations per pair,
head and element forward, 10 backward; masked pairs are not counted), and their ratios to the speed
under the full mask, if it comes before, and to torch's.  --output adds the seconds of all trials
to a benchmark file, with CPU, BLAS, the CPU that it takes this one for, and versions;
``plot.py --what kernels`` draws it.
Exit code 1: a result is wrong, by a sample compared with float64.  2: bad input.
"""

from a2d_mpi.experiments.bench_tile import MASKS, bench_tile, shapes
from a2d_mpi.experiments.options import MASK_HELP, TRIALS, Parser, masks, path, run_serial, utf8


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("bench_tile.py", __doc__)
    parser.add_argument("--trials", type=TRIALS, default=7)
    parser.add_argument(
        "--shapes",
        type=shapes,
        default="4096x4x128,8192x2x64",
        help="seqlen x heads x headdim, separated by commas (default %(default)s)",
    )
    parser.add_argument("--output", type=path, help="HDF5 file that the seconds are added to")
    parser.add_argument("--name", type=utf8, help="of the figures; default: CPU and BLAS")
    text = f"all, or {MASK_HELP} (default %(default)s)"
    parser.add_argument("--masks", type=masks, default=",".join(MASKS), help=text)
    return parser


if __name__ == "__main__":
    run_serial(build_parser, bench_tile)
