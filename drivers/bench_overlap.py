"""The share of the communication that the overlap hides, by each of its means.

    bash jobs/emulate.sh 2 1 200mbit -- python drivers/bench_overlap.py --seqlen 4096

On every grid of one row or one column: the seconds of the kernels and merges alone (of the runs
without overlap: no message is under way then), of the transfers (bytes over the rate that the
phases without overlap reach), and of the whole with and without overlap, by who calls MPI while
the kernels run (`a2d_mpi.comm.transport.PROGRESS`).  Medians over the trials of the slowest rank;
the variants take turns.  "hidden": the share of the shorter one of compute and transfer that ran
beside the other.

    bash jobs/emulate.sh 2 1 600mbit -- python drivers/bench_overlap.py --refinements --seqlen 8192

With --refinements, instead: the whole with every refinement of the schedules, and without each one
of them: shards that travel between two ranks in one message, instead of two; own work done first,
instead of a share of it last, while partial results travel; the other one of the two reductions
of the backward pass finished block by block.  Medians, and by how much they are slower.
"""

from mpi4py import MPI

from a2d_mpi.experiments.bench_overlap import bench_overlap
from a2d_mpi.experiments.cli import Parser, run
from a2d_mpi.experiments.options import HEADDIM, HEADS, MASK_HELP, SEQLEN, TRIALS, mask_text


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("bench_overlap.py", __doc__, comm)
    add = parser.add_argument
    add("--seqlen", type=SEQLEN, default=4096)
    add("--nheads", type=HEADS, default=8)
    add("--headdim", type=HEADDIM, default=64)
    add("--mask", type=mask_text, default="causal", help=f"{MASK_HELP} (default %(default)s)")
    add("--refinements", action="store_true", help="leave out each refinement of the schedules")
    add("--trials", type=TRIALS, default=5)
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, bench_overlap)
