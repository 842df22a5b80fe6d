"""Generate text from a checkpoint of drivers/train_gpt.py, the cache spread over the ranks.

    mpiexec -n 4 python drivers/generate.py results/tiny --prompt "To be" --prompt "The " \
        --tokens 200 --temperature 0.8 --top-k 40

Keys and values of all requests lie in blocks on all ranks; --room limits the blocks of each rank,
and a rank without room borrows it from others.  What there is no room for now waits.
With --attention-ranks and --ffn-ranks, MLPs are on ranks of their own (docs/afd.md).
Exit code 1: a request was refused, because it fits nowhere; 2: bad input.
"""

from mpi4py import MPI

from a2d_mpi.experiments.cli import Parser, add_engine, run
from a2d_mpi.experiments.generate import generate
from a2d_mpi.experiments.model_options import BLOCK
from a2d_mpi.experiments.options import (
    METHOD_HELP,
    SEED,
    listed,
    method_name,
    path,
    real,
    whole,
)
from a2d_mpi.experiments.survival import add_survive


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("generate.py", __doc__, comm)
    add = parser.add_argument
    add("checkpoint", type=path, help="file, or folder (its latest checkpoint)")
    add("--prompt", action="append", required=True, help="text; may be given several times")
    add("--tokens", type=whole(1), default=100, help="new ones a prompt (default %(default)s)")
    add("--temperature", type=real(0, 1e6), default=0.0, help="0: the likeliest (default)")
    add("--top-k", type=whole(1), help="draw from the K likeliest tokens; default: all")
    add("--seed", type=SEED, default=0, help="of what is drawn (default %(default)s)")
    add("--room", type=listed(whole(0)), help="blocks on each rank: 10,10,4,10; default: no limit")
    add("--arrive", type=listed(whole(0)), help="steps at which prompts come: 0,0,7; default: 0")
    add("--block", type=BLOCK, default=16, help="tokens of a block (default %(default)s)")
    add("--method", type=method_name, default="attention2d", help=f"for prompts: {METHOD_HELP}")
    add("--rows", type=whole(1), help="R of the grid; default: as square as the ranks allow")
    add("--cols", type=whole(1), help="C of the grid; default: ranks / rows / heads")
    add("--heads", type=whole(1), default=1, help="U, ranks that share the heads; default: 1")
    add("--attention-ranks", type=whole(1), help="A: they hold the cache; the grid is theirs")
    add("--ffn-ranks", type=whole(1), help="F: all other ranks, which hold MLPs and embeddings")
    add("--micro-batches", type=whole(1), help="of a step, with --ffn-ranks; default: 3")
    add_survive(parser)
    add_engine(parser)
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, generate)
