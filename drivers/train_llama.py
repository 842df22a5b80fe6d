r"""Train a Llama of Hugging Face transformers on a text, its sequence spread over the ranks.

    mpiexec -n 4 python drivers/train_llama.py data/new_testament.txt --rows 2 --cols 2 \
        --steps 100 --output results/llama.h5

It needs PyTorch and transformers: pip install -e '.[torch]'.  Weights are random, tokens are
bytes, documents end at --separator.  Loss and gradients of the first step are compared with one
process in float64.

Exit code 0: done.  1: the first step differs, or the loss is no longer finite.  2: bad input, or
nothing can be written.
"""

import argparse

from mpi4py import MPI

from a2d_mpi.experiments.cli import Parser, add_engine, run, together
from a2d_mpi.experiments.grids import add_grid
from a2d_mpi.experiments.model_options import add_sizes, add_training
from a2d_mpi.experiments.options import add_options


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("train_llama.py", __doc__, comm)
    add_sizes(parser, layers=2, width=128, mlp=344, nheads=8, nheads_kv=2)
    group = add_training(parser)
    text = "do not compare the first step: one process would have seqlen x seqlen matrices"
    group.add_argument("--unchecked", action="store_true", help=text)
    add_options(group, "output", help="HDF5 file for losses, seconds and checks")
    add_grid(parser)
    add_engine(parser)
    return parser


def train(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Import PyTorch on all ranks, or on none, and run the job."""

    def job() -> object:
        try:
            from a2d_mpi.experiments.train_llama import train
        except ImportError as error:
            raise ValueError(f"{error}; pip install a2d_mpi[torch]") from None
        return train

    return together(comm, job)(comm, args)


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, train)
