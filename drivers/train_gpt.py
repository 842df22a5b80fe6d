"""Train a GPT on a text, byte by byte, its sequence spread over the ranks.

    mpiexec -n 4 python drivers/train_gpt.py TEXT --preset tiny --folder results/tiny \
        --rows 2 --cols 2 --steps 200 --output results/tiny.h5

Packed documents do not see each other; they are cut at --separator.  Checkpoints in --folder:
--resume continues the run, to the same bits as without a break on the same grid and CPU.
Exit code 1: the loss is no longer finite.  2: bad input, or nothing can be written.
"""

from mpi4py import MPI

from a2d_mpi.experiments.cli import Parser, add_engine, run
from a2d_mpi.experiments.grids import add_grid
from a2d_mpi.experiments.model_options import add_model
from a2d_mpi.experiments.options import SEED, add_trace, escaped, path, real, whole
from a2d_mpi.experiments.survival import add_survive
from a2d_mpi.experiments.train_gpt import train


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("train_gpt.py", __doc__, comm)
    add = parser.add_argument
    add("text", type=path, help="text file; its bytes are the tokens")
    add("--folder", type=path, required=True, help="of checkpoints")
    add("--output", type=path, help="HDF5 file for losses, seconds and traffic")
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume", action="store_true", help="resume from the latest whole checkpoint"
    )
    start.add_argument(
        "--anew", action="store_true", help="begin, and move checkpoints to a folder in --folder"
    )
    add_model(parser, "tiny")
    add(
        "--layer-pattern",
        metavar="LLLN",
        help="exact (N) and linear (L) attention, layer by layer, again and again; default: N",
    )
    add("--seqlen", type=whole(2), default=1024, help="tokens of a step (default %(default)s)")
    add(
        "--separator",
        type=escaped,
        default=r"\n\n\n",
        help=r"of documents (default \n\n\n); empty: none",
    )
    add("--validate", type=real(0, 1), default=0.0, metavar="SHARE",
        help="of the documents: held out, and evaluated at the end (default: none)")  # fmt: skip
    add_grid(parser)
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--steps", type=whole(1), default=200, help="of the whole run (default %(default)s)")
    add("--until", type=whole(1), help="stop after this step; default: --steps")
    add("--every", type=whole(1), default=50, help="steps between checkpoints (%(default)s)")
    add(
        "--rate",
        type=real(0, 1e6),
        default=1e-3,
        help="highest learning rate (default %(default)s)",
    )
    add("--warmup", type=whole(1), default=20, help="steps (default %(default)s)")
    add("--seed", type=SEED, default=0, help="of weights and batches (default %(default)s)")
    add_survive(parser)
    add_trace(parser, "of the last step")
    add_engine(parser)
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, train)
