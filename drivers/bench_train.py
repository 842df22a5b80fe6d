"""A GPT's training step by different plans, side by side: seconds by part, bytes, memory.

    mpiexec -n 4 python drivers/bench_train.py --output results/step.h5 --preset gpt3-175b-layer \
        --width 192 --nheads 12 --positions rotary --seqlen 2048 --plans attention2d:2x2,ring

Random weights and tokens.  The loss and the gradients of every plan are checked against a model in
float64 on one rank, whose attention is a textbook's.  Plans are those of drivers/bench.py; a
learning rate of 0 keeps the weights, so every step must repeat the first one to the bit.
The largest memory of a step's activations is counted once, in a step that is not timed; with
--recompute both ways are run.  --resume adds to a file, also with other numbers of ranks.
Exit code 1: a check failed, 2: bad input, or nothing can be written.
"""

from mpi4py import MPI

from a2d_mpi.experiments.bench_train import bench_train
from a2d_mpi.experiments.cli import Parser, run
from a2d_mpi.experiments.model_options import add_model
from a2d_mpi.experiments.options import (
    SEED,
    THREADS,
    TRIALS,
    mask_text,
    path,
    tokens,
    whole,
)


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("bench_train.py", __doc__, comm)
    add = parser.add_argument
    add("--output", type=path, required=True, help="HDF5 file")
    add("--resume", action="store_true", help="add to the file what is not there yet")
    add_model(parser, "gpt3-175b-layer")
    add(
        "--vocab",
        type=whole(2, 1 << 24),
        default=256,
        help="tokens that there are (default %(default)s)",
    )
    add("--seqlen", type=tokens, default="2K", help="tokens of a step (default %(default)s)")
    add("--mask", type=mask_text, default="causal", help="default %(default)s")
    add("--plans", default="attention2d,ring", help="as of drivers/bench.py (%(default)s)")
    add(
        "--profile",
        type=path,
        help="TOML file of this machine, for predictions; see drivers/calibrate.py",
    )
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--trials", type=TRIALS, default=5, help="timed steps of each (default %(default)s)")
    add("--seed", type=SEED, default=0, help="of weights and tokens (default %(default)s)")
    add("--threads", type=THREADS, default=1, help="BLAS threads per rank (default %(default)s)")
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, bench_train)
