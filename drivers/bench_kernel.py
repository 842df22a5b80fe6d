"""Benchmark of kernels, beside PyTorch's scaled_dot_product_attention, in one process.

    python drivers/bench_kernel.py --shapes 512x2x64 --trials 3
    python drivers/bench_kernel.py --trials 9 --output data/results/tiles.h5
    python drivers/bench_kernel.py --shapes 16384x8x64 --masks full,sliding_window,causal_document
    python drivers/bench_kernel.py --device gpu --masks full,sliding_window_causal:4096
    OPENBLAS_CORETYPE=Haswell python drivers/bench_kernel.py  # as if the CPU were another

To compare with PyTorch: pip install -e '.[bench]'; on CPUs its build for CPUs is enough.

All kernels run in turn, trial by trial.  On a CPU these are "numpy" and, where Numba is installed,
"numba", on one core.  On a GPU it is the fastest kernel that is installed.  For the masks that
torch has, its attention runs too, on a GPU by each of its backends.  The backward pass is timed
against torch's autograd.

The driver prints FLOP/s in the median over the trials: 4 operations per pair, head and element
forward, and 10 backward.  Masked pairs are not counted.  It also prints the ratios to the speed
under the full mask, if this mask comes first, and to the speed of torch's fastest backend.
--output adds the seconds of all trials to a benchmark file, with versions, the CPU or GPU, BLAS,
and the CPU that BLAS takes this CPU for.  "plot.py results FILE --what kernels" draws the file.

Exit code 0: all results are right.  1: a result is wrong, by a sample compared with float64.
2: bad input.
"""

from a2d_mpi.experiments.bench_kernel import MASKS, bench_kernel, shape
from a2d_mpi.experiments.options import Parser, add_options, listed, run_serial, utf8


def build_parser() -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("bench_kernel.py", __doc__)
    group = parser.add_argument_group("workloads and kernels")
    add = group.add_argument
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where the kernels run")
    text = "SEQLENxNHEADSxHEADDIM; default: 4096x4x128,8192x2x64 or, on a GPU, 16384x16x128"
    add("--shapes", type=listed(shape), metavar="SHAPE,...", help=text)
    add_options(group, "nheads-kv", help="KV heads of all shapes; default: as many as query heads")
    add_options(group, "masks", default=",".join(MASKS))
    text = "storage dtype; default: float32 or, on a GPU, bfloat16"
    add_options(group, "dtype", default=None, help=text)
    text = "names in a2d_mpi.kernels.KERNELS; default: numpy,auto or, on a GPU, auto"
    add("--kernels", type=listed(utf8), metavar="KERNEL,...", help=text)
    group = parser.add_argument_group("measurement and output")
    add_options(group, "trials")
    add_options(group, "output", help="HDF5 file to which the seconds are added")
    text = "name of the results in the file; default: CPU or GPU, and BLAS"
    group.add_argument("--name", type=utf8, metavar="TEXT", help=text)
    return parser


if __name__ == "__main__":
    run_serial(build_parser, bench_kernel)
