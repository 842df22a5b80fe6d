"""Figures for GPUs: kernels against PyTorch's, ranks that share a GPU against one, MPI's rate.

    mpiexec -n 1 python drivers/bench_gpu.py kernel     # pip install torch, to compare with
    mpiexec -n 1 python drivers/bench_gpu.py kernel --masks full sliding_window_causal:4096
    mpiexec -n 4 python drivers/bench_gpu.py split
    mpiexec -n 4 python drivers/bench_gpu.py transfers

kernel: calls of the library, merge and all, on one rank, and the fastest backend of torch's
scaled_dot_product_attention, for the masks that it has, in turn; TFLOP/s of visible pairs.  split:
the same problem on one rank alone and on the grid of all ranks, in turn.  transfers: each rank
sends to the next and receives from the one before.  Medians over the trials, by the slowest rank;
--output keeps all, for drivers/plot.py.  Exit code 1 if a result is wrong, 2 for bad input.
"""

from mpi4py import MPI

from a2d_mpi.comm.gpus import TRANSFERS
from a2d_mpi.experiments.bench_gpu import BENCHMARKS, MASKS, bench_gpu
from a2d_mpi.experiments.cli import Parser, run
from a2d_mpi.experiments.options import HEADDIM, HEADS, MASK_HELP, SEQLEN, TRIALS, mask_text, path


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("bench_gpu.py", __doc__, comm)
    add = parser.add_argument
    add("what", choices=BENCHMARKS)
    add("--seqlen", type=SEQLEN, default=16384)
    add("--nheads", type=HEADS, default=16)
    add("--nheads-kv", type=HEADS, help="default: nheads")
    add("--headdim", type=HEADDIM, default=128)
    add("--masks", type=mask_text, nargs="+", default=MASKS, help=f"of kernel: {MASK_HELP}")
    add("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    add("--kernel", default="auto", help="of a2d_mpi.kernels.KERNELS (default %(default)s)")
    add("--transfers", choices=TRANSFERS, default="auto")
    add("--trials", type=TRIALS, default=10)
    add("--output", type=path, help="HDF5 file, to which the figures are added")
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, bench_gpu)
