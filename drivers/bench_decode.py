"""Seconds, bytes and messages of a decoding step, by length of context and number of ranks.

    mpiexec -n 4 python drivers/bench_decode.py --output results/decode.h5

The caches of all ranks are filled with random keys and values, there is no prompt to compute.
Attention of one request is checked against float64, all bytes and messages against the prediction.
Exit code 1: a check failed; 2: bad input.
"""

from mpi4py import MPI

from a2d_mpi.experiments.bench_decode import bench_decode
from a2d_mpi.experiments.cli import Parser, run
from a2d_mpi.experiments.model_options import BLOCK, LAYERS, WIDTH
from a2d_mpi.experiments.options import (
    HEADDIM,
    HEADS,
    SEED,
    SEQLEN,
    THREADS,
    TRIALS,
    add_trace,
    listed,
    path,
    split,
    whole,
)


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("bench_decode.py", __doc__, comm)
    add = parser.add_argument
    contexts = [1024, 4096, 16384, 65536]
    add("--contexts", type=listed(SEQLEN), default=contexts, help="default: 1024 to 65536")
    add("--ranks", type=listed(whole(1)), help="default: 1, 2, 4, ... times --heads")
    add("--apart", type=listed(split), default=[], help="attention+FFN ranks, too: 2+2,3+1")
    add("--micro-batches", type=whole(1), default=3, help="with --apart (default %(default)s)")
    add("--heads", type=whole(1), default=1, help="U, ranks that share the heads; default: 1")
    add(
        "--requests",
        type=whole(1, 1 << 16),
        default=4,
        help="rows of a step (default %(default)s)",
    )
    for name, kind, default in (
        ("layers", LAYERS, 2),
        ("width", WIDTH, 512),
        ("nheads", HEADS, 8),
        ("nheads-kv", HEADS, 2),
    ):
        add(f"--{name}", type=kind, default=default, help="default %(default)s")
    add("--headdim", type=HEADDIM, help="default: width / nheads")
    add("--block", type=BLOCK, default=16, help="tokens of a block (default %(default)s)")
    add("--trials", type=TRIALS, default=15, help="timed steps (default %(default)s)")
    add("--seed", type=SEED, default=0, help="default %(default)s")
    add("--threads", type=THREADS, default=1, help="BLAS threads per rank (default %(default)s)")
    add("--output", type=path, help="HDF5 file")
    add_trace(parser, "of the last step of each run")
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, bench_decode)
