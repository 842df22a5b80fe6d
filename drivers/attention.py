r"""Distributed attention on Q, K, V from a file: checked, then timed, and written to HDF5.

    mpiexec -n 4 python drivers/attention.py data/minilm_l3_1536.h5 \
        --rows 2 --cols 2 --mask causal --backward --check full --output results/run.h5

Exit code 0: all checks passed.  1: a check failed.  2: bad input, or the output cannot be written.
"""

if __name__ == "__main__":
    from a2d_mpi.experiments import end_job_on_errors

    end_job_on_errors()

from mpi4py import MPI

from a2d_mpi.experiments.cli import Parser, add_grid, run
from a2d_mpi.experiments.job import attention
from a2d_mpi.experiments.options import CHECK_HELP, add_engine, add_options, path, slices


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("attention.py", __doc__, comm)
    text = "HDF5 file with q, k, v and optionally dout, see data/README.md"
    parser.add_argument("input", type=path, help=text)

    group = parser.add_argument_group("problem")
    add_options(group, "mask")
    text = "use only the first tokens of the file: 65536 or 64K; default: all"
    add_options(group, "seqlen", help=text)
    add_options(group, "dtype", "backward", "wire")

    group = add_grid(parser)
    add_options(group, "distribution", "overlap")
    text = (
        "slices of the heads, whose messages travel while others compute; forward and backward: "
        "4 or 2x4; default: chosen from the sizes"
    )
    group.add_argument("--slices", type=slices, metavar="F[xB]", help=text)

    group = parser.add_argument_group("measurement and checks")
    add_options(group, "trials", "warmup")
    add_options(group, "check", help=f"{CHECK_HELP}, none")
    add_options(group, "seed")

    group = parser.add_argument_group("output")
    add_options(group, "output")
    text = "also write out, lse and the gradients"
    group.add_argument("--save-outputs", action="store_true", help=text)
    text = "JSON file for a timeline of all ranks, for Perfetto: one more run, before the trials"
    group.add_argument("--trace", type=path, metavar="FILE", help=text)
    add_engine(parser)
    return parser


if __name__ == "__main__":
    # Nodes may have the files in different places.
    run(MPI.COMM_WORLD, build_parser, attention, apart=("input",))
