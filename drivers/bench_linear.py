"""Seconds and bytes of linear attention (LASP-2, LASP) beside exact attention, by length.

    mpiexec -n 4 python drivers/bench_linear.py --output results/linear.h5

Sampled rows of all results are checked against dense attention of either kind in float64, and all
bytes against the formula.  Exit code 1: a check failed; 2: bad input.
"""

from mpi4py import MPI

from a2d_mpi.experiments.bench_linear import LINEAR, bench_linear
from a2d_mpi.experiments.cli import Parser, run
from a2d_mpi.experiments.options import (
    HEADDIM,
    HEADS,
    SEED,
    SEQLEN,
    THREADS,
    TRIALS,
    listed,
    one_of,
    path,
    real,
    whole,
)
from a2d_mpi.linear.features import FEATURE_MAPS
from a2d_mpi.linear.norms import NORMS
from a2d_mpi.linear.plan import CHUNK
from a2d_mpi.schedules import METHODS


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("bench_linear.py", __doc__, comm)
    add = parser.add_argument
    add(
        "--plans",
        type=listed(one_of((*LINEAR, *METHODS))),
        default=[*LINEAR, "attention2d"],
        help="lasp2, lasp, or methods of exact attention; default: lasp2,lasp,attention2d",
    )
    lengths = [1024, 2048, 4096]
    add("--seqlens", type=listed(SEQLEN), default=lengths, help="default: 1024,2048,4096")
    add("--mask", choices=("causal", "full"), default="causal", help="default %(default)s")
    add("--nheads", type=HEADS, default=8, help="default %(default)s")
    add("--headdim", type=HEADDIM, default=64, help="default %(default)s")
    add("--dtype", choices=("float32", "float64"), default="float32", help="default %(default)s")
    add("--feature-map", choices=FEATURE_MAPS, default="elu+1", help="default %(default)s")
    add("--norm", choices=NORMS, default="output", help="default %(default)s")
    add("--decay", type=real(0, 1), help="of all heads; default: none")
    add("--distribution", default="contiguous", help="of linear attention; default %(default)s")
    add("--chunk", type=whole(1, 4096), default=CHUNK, help="tokens (default %(default)s)")
    add("--trials", type=TRIALS, default=5, help="timed calls (default %(default)s)")
    add("--seed", type=SEED, default=0, help="default %(default)s")
    add("--threads", type=THREADS, default=1, help="BLAS threads per rank (default %(default)s)")
    add("--output", type=path, help="HDF5 file")
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, bench_linear)
