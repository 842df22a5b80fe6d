r"""Distributed attention, on random tensors or those of a file: checked, then timed.

    mpiexec -n 4 python -m a2d_mpi attention --rows 2 --cols 2 --mask causal --backward
    mpiexec -n 4 python -m a2d_mpi attention data/minilm_l3_1536.h5 \
        --rows 2 --cols 2 --mask causal --backward --check full --output results/run.h5

Exit code 0: all checks passed.  1: a check failed.  2: bad input, or the output cannot be written.
"""

from collections.abc import Callable

from a2d_mpi.experiments.attention import attention
from a2d_mpi.experiments.cli import add_grid
from a2d_mpi.experiments.options import CHECK_HELP, Parser, add_engine, add_options, path, slices


def build(parser: Parser) -> Callable:
    """Add the options of this command, and return its body."""
    text = "HDF5 file with q, k, v and optionally dout, see data/README.md; default: random"
    parser.add_argument("input", type=path, nargs="?", help=text)

    group = parser.add_argument_group("problem")
    add_options(group, "mask")
    text = "use only the first tokens: 65536 or 64K; default: all of the file, or 1536 random ones"
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
    parser.apart = ("input",)  # nodes may have the file in different places
    return attention
