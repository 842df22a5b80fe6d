r"""Generate text with a model of transformers, with the KV cache spread over the ranks.

    mpiexec -n 4 python drivers/generate.py results/tiny --prompt "To be" --prompt "The " \
        --tokens 200 --temperature 0.8

The model is a folder of transformers, with config, weights and tokenizer.  Without a tokenizer,
tokens are bytes.  Prompts are answered one after the other, and their tokens are printed as they
come.  --room limits the tokens that each rank keeps.

It can also be a checkpoint of train.py gpt, or a folder of them.  Keys and values then lie in
blocks on all ranks, and --room limits the blocks of each rank; a rank without room borrows room
from others.  Requests that do not fit are queued.  With --ffn-ranks, MLPs are on ranks of their
own (docs/models.md).

Exit code 0: all prompts were answered.  1: a request was refused, because it fits nowhere.
2: bad input.
"""

if __name__ == "__main__":
    from a2d_mpi.experiments import end_job_on_errors

    end_job_on_errors()

import argparse

from mpi4py import MPI

from a2d_mpi.experiments.cli import Parser, run, together
from a2d_mpi.experiments.options import add_engine, add_options, listed, path, real, tokens, whole


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("generate.py", __doc__, comm)
    text = "folder of transformers, checkpoint, or folder with checkpoints (the latest is used)"
    parser.add_argument("checkpoint", metavar="MODEL", type=path, help=text)
    group = parser.add_argument_group("requests")
    add = group.add_argument
    text = "beginning of a text; may be repeated"
    add("--prompt", metavar="TEXT", action="append", default=[], help=text)
    text = "file with the beginning of a text; may be repeated; these come first"
    add("--prompt-file", metavar="FILE", type=path, action="append", default=[], help=text)
    text = "new tokens per prompt"
    add("--tokens", type=tokens(), metavar="TOKENS", default=100, help=text)
    text = "softmax temperature; 0: take the likeliest token"
    add("--temperature", type=real(0, 1e6), metavar="X", default=0.0, help=text)
    add_options(group, "seed")
    group = parser.add_argument_group("cache and ranks")
    add = group.add_argument
    text = (
        "tokens of each rank, or KV cache blocks of each grid position: 9,9,4; default: no limit"
    )
    add("--room", type=listed(whole(0)), metavar="N,...", help=text)
    text = "tokens per block of the KV cache"
    block = tokens(most=1 << 20)
    add("--kv-block", type=block, metavar="TOKENS", default=16, help=text)
    add_options(group, "method", "rows", "cols", "head-ranks")
    text = "last ranks, which hold MLPs and embeddings; the others hold the cache, in a grid"
    add("--ffn-ranks", type=whole(1), metavar="F", help=text)
    text = "micro-batches of a step, with --ffn-ranks; default: 3"
    add("--micro-batches", type=whole(1), metavar="N", help=text)
    add_options(group, "survive")
    add_engine(parser)
    return parser


def generate(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Generate text with the model of the folder, whichever kind it is."""
    if together(comm, lambda: (args.checkpoint / "config.json").exists()):
        from a2d_mpi.experiments.generate_text import generate_text

        return generate_text(comm, args)
    from a2d_mpi.experiments import generate

    return generate.generate(comm, args)


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, generate)
