"""Train a Llama of Hugging Face transformers on a text, its sequence spread over the ranks.

    mpiexec -n 4 python drivers/train_llama.py data/new_testament.txt --rows 2 --cols 2 \
        --steps 100 --output results/llama.h5

It needs PyTorch and transformers: pip install -e '.[torch]'.  Weights are random, tokens are
bytes, documents end at --separator.  Loss and gradients of the first step are compared with one
process in float64.  Exit code 1: they differ, or the loss is no longer finite.  2: bad input, or
nothing can be written.
"""

import argparse

from mpi4py import MPI

from a2d_mpi.experiments.cli import Parser, add_engine, run, together
from a2d_mpi.experiments.grids import add_grid
from a2d_mpi.experiments.model_options import LAYERS, WIDTH
from a2d_mpi.experiments.options import HEADS, SEED, escaped, path, real, whole


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("train_llama.py", __doc__, comm)
    add = parser.add_argument
    add("text", type=path, help="text file; its bytes are the tokens")
    add("--output", type=path, help="HDF5 file for losses, seconds and checks")
    sizes = {"layers": (LAYERS, 2), "width": (WIDTH, 128), "mlp": (WIDTH, 344)}
    for name, (kind, size) in sizes.items():
        add(f"--{name}", type=kind, default=size, help="default %(default)s")
    add("--nheads", type=HEADS, default=8, help="query heads (default %(default)s)")
    add("--nheads-kv", type=HEADS, default=2, help="KV heads (default %(default)s)")
    add("--seqlen", type=whole(2), default=1024, help="tokens of a step (default %(default)s)")
    add("--separator", type=escaped, default=r"\n\n\n",
        help=r"of documents (default \n\n\n); empty: none")  # fmt: skip
    add_grid(parser)
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--steps", type=whole(1), default=100, help="default %(default)s")
    add("--rate", type=real(0, 1e6), default=1e-3, help="learning rate (default %(default)s)")
    add("--seed", type=SEED, default=0, help="of weights and batches (default %(default)s)")
    text = "do not compare the first step: one process would have seqlen x seqlen matrices"
    add("--unchecked", action="store_true", help=text)
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
