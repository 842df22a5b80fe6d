"""Kernels beside each other, and beside PyTorch's scaled_dot_product_attention, in one process.

    pip install -e '.[bench]'  # torch, to compare with; on CPUs its build for CPUs is enough
    python drivers/bench_kernel.py --trials 9 --output data/results/tiles.h5
    python drivers/bench_kernel.py --shapes 16x16x16,64x16x16,256x8x64 --trials 301
    python drivers/bench_kernel.py --shapes 16384x8x64 --masks full,sliding_window,causal_document
    OPENBLAS_CORETYPE=Haswell python drivers/bench_kernel.py  # as if the CPU were another
    python drivers/bench_kernel.py --device gpu --masks full,sliding_window_causal:4096

All kernels run in turn, trial by trial: on CPUs "numpy" and, where Numba is installed, "numba", on
one core; on a GPU the fastest that is installed.  For the masks that torch has, its attention runs
too, on a GPU by each of its backends.  The backward pass is timed against torch's autograd.
Prints FLOP/s in the median over the trials (4 operations per pair, head and element forward, 10
backward; masked pairs are not counted), and their ratios to the speed under the full mask, if it
comes before, and to torch's fastest.  --output adds the seconds of all trials to a benchmark file,
with CPU or GPU, BLAS, the CPU that it takes this one for, and versions; ``plot.py --what kernels``
draws it.
Exit code 1: a result is wrong, by a sample compared with float64.  2: bad input.
"""

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.experiments.bench_kernel import MASKS, bench_kernel, shape
from a2d_mpi.experiments.options import (
    HEADS,
    MASK_HELP,
    TRIALS,
    Parser,
    listed,
    masks,
    path,
    run_serial,
    utf8,
)


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("bench_kernel.py", __doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), default="cpu", help="default %(default)s")
    text = "seqlen x heads x headdim, listed: 4096x4x128,8192x2x64 or, on a GPU, 16384x16x128"
    add("--shapes", type=listed(shape), help=text)
    add("--nheads-kv", type=HEADS, help="KV heads of all shapes; default: as many as heads")
    text = f"all, or {MASK_HELP} (default %(default)s)"
    add("--masks", type=masks, default=",".join(MASKS), help=text)
    add("--dtype", choices=DTYPES, help="default: float32 or, on a GPU, bfloat16")
    text = "of a2d_mpi.kernels.KERNELS, listed; default: numpy,auto or, on a GPU, auto"
    add("--kernels", type=listed(utf8), help=text)
    add("--trials", type=TRIALS, default=7, help="default %(default)s")
    add("--output", type=path, help="HDF5 file that the seconds are added to")
    add("--name", type=utf8, help="of the figures; default: CPU or GPU, and BLAS")
    return parser


if __name__ == "__main__":
    run_serial(build_parser, bench_kernel)
