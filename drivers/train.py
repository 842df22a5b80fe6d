r"""Train a model on a text, byte by byte, its sequence spread over the ranks.

    mpiexec -n 4 python drivers/train.py gpt data/new_testament.txt --preset tiny \
        --folder results/tiny --rows 2 --cols 2 --steps 200 --output results/tiny.h5
    mpiexec -n 4 python drivers/train.py llama data/new_testament.txt --rows 2 --cols 2 \
        --steps 100 --output results/llama.h5

Exit code 0: done.  1: the loss is no longer finite, or the first step of a Llama is wrong.  2: bad
input, or nothing can be written.
"""

if __name__ == "__main__":
    from a2d_mpi.experiments import end_job_on_errors

    end_job_on_errors()

import argparse
from collections.abc import Callable

from mpi4py import MPI

from a2d_mpi.experiments.cli import Parser, add_grid, run, together
from a2d_mpi.experiments.options import add_engine, add_options, path, real, whole
from a2d_mpi.experiments.programs import Commands
from a2d_mpi.experiments.train_gpt import add_model, add_sizes, add_training, train


def gpt(parser: Parser) -> Callable:
    r"""Train a GPT of this package, with checkpoints.

        mpiexec -n 4 python drivers/train.py gpt data/new_testament.txt --preset tiny \
            --folder results/tiny --rows 2 --cols 2 --steps 200 --output results/tiny.h5

    Packed documents do not see each other; they end at --separator.  Checkpoints are in --folder.
    --resume continues the run, bit for bit as without a break on the same grid and CPU.
    """
    text = "exact (N) and linear (L) attention, layer by layer, again and again; default: N"
    add_model(parser).add_argument("--layer-pattern", metavar="LLLN", help=text)

    add = add_training(parser).add_argument
    text = "share of the documents to hold out, and to evaluate at the end"
    add("--validate", type=real(0, 1), metavar="X", default=0.0, help=text)
    text = "steps until the learning rate is highest"
    add("--warmup-steps", dest="warmup", type=whole(1), metavar="N", default=20, help=text)

    group = parser.add_argument_group("checkpoints and output")
    add = group.add_argument
    add("--folder", type=path, metavar="DIR", required=True, help="folder of checkpoints")
    add("--every", type=whole(1), metavar="N", default=50, help="steps between checkpoints")
    add_options(group, "resume", help="resume from the latest whole checkpoint")
    add_options(group, "output", help="HDF5 file for losses, seconds and traffic")
    add_options(add_grid(parser), "survive")
    add_engine(parser)
    return train


def llama(parser: Parser) -> Callable:
    r"""Train a Llama of Hugging Face transformers.

        mpiexec -n 4 python drivers/train.py llama data/new_testament.txt --rows 2 --cols 2 \
            --steps 100 --output results/llama.h5

    It needs PyTorch and transformers: pip install -e '.[torch]'.  Weights are random, tokens are
    bytes, documents end at --separator.  Loss and gradients of the first step are compared with
    one process in float64.
    """
    add_sizes(parser, layers=2, width=128, mlp=344, nheads=8, nheads_kv=2)
    group = add_training(parser)
    add_options(group, "output", help="HDF5 file for losses, seconds and checks")
    add_grid(parser)
    add_engine(parser)
    return _train_llama


def _train_llama(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Import PyTorch on all ranks, or on none, and run the job."""

    def job() -> Callable:
        try:
            from a2d_mpi.experiments.train_llama import train_llama
        except ImportError as error:
            raise ValueError(f"{error}; pip install a2d_mpi[torch]") from None
        return train_llama

    return together(comm, job)(comm, args)


def build_parser(comm: MPI.Intracomm | None = None) -> Commands:
    """Build the parser of this driver's options."""
    return Commands("train.py", __doc__, gpt, llama, comm=comm)


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser)
