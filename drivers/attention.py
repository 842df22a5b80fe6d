"""Distributed attention on Q, K, V from a file: checked, then timed, and written to HDF5.

    mpiexec -n 4 python drivers/attention.py data/minilm_l3_1536.h5 \
        --rows 2 --cols 2 --mask causal --backward --check full --output results/run.h5

Exit code 0: all checks passed.  1: a check failed.  2: bad input, or the output cannot be written.
"""

from mpi4py import MPI

from a2d_mpi.core.config import DISTRIBUTIONS
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.wire import FORMATS
from a2d_mpi.experiments.cli import Parser, add_engine, run
from a2d_mpi.experiments.grids import add_grid
from a2d_mpi.experiments.job import attention
from a2d_mpi.experiments.options import (
    CHECK_HELP,
    SEED,
    SEQLEN,
    TRIALS,
    WARMUP,
    WIRE_HELP,
    add_mask,
    add_trace,
    check_text,
    path,
    real,
    whole,
)


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("attention.py", __doc__, comm)
    add = parser.add_argument
    add("input", type=path, help="HDF5 file with q, k, v and perhaps dout (see data/README.md)")
    add_grid(parser)
    add("--inner", type=whole(1), help="ranks of an inner ring of a double one; default: columns")
    add("--stream", action="store_true", default=None, help="hold one side of a tile only")
    add_mask(parser, default="causal")
    add("--distribution", choices=DISTRIBUTIONS, help="default: by predicted time")
    add("--dtype", choices=DTYPES, default="float32")
    add("--seqlen", type=SEQLEN, help="use the first tokens of the file only; default: all")
    add("--backward", action="store_true", help="also the gradients")
    add(
        "--softcap",
        type=real(1e-30, 1e30),
        help="c: logits s become c tanh(s / c); default: no soft-cap",
    )
    add("--sink", action="store_true", help="a logit per head, from --seed, in the denominator")
    add("--wire", choices=FORMATS, help=f"{WIRE_HELP}; default: as they are")
    add("--no-overlap", action="store_true", help="communicate and compute in turn")
    add("--trials", type=TRIALS, default=5, help="timed runs (default %(default)s)")
    add("--warmup", type=WARMUP, default=1, help="runs before them (default %(default)s)")
    add("--check", type=check_text, default="sample", help=f"{CHECK_HELP}, none; default: sample")
    add("--seed", type=SEED, default=0, help="of the sample, and of dout if the file has none")
    add("--output", type=path, help="HDF5 file for timings, traffic and checks")
    add("--save-outputs", action="store_true", help="also write out, lse and the gradients")
    add_trace(parser, "of one run more, before the trials")
    add_engine(parser)
    return parser


if __name__ == "__main__":
    # Nodes may have the files in different places.
    run(MPI.COMM_WORLD, build_parser, attention, apart=("input", "mask_file"))
