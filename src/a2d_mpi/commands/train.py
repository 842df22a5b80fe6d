r"""Train a model of transformers on texts, its sequence spread over the ranks.

    mpiexec -n 4 python -m a2d_mpi train llama-tiny data/new_testament.txt --rows 2 --cols 2 \
        --folder results/tiny --steps 200 --output results/tiny.h5

MODEL is a small random model by its name, or a folder of transformers.  If the folder has no
weights, they are random.  If it has no tokenizer, tokens are bytes.  Packed documents end at
--separator, and do not see each other.  Each checkpoint in --folder is a folder that
`from_pretrained` loads.  --resume continues the run, bit for bit as without a break on the same
grid and CPU.  Loss and gradients of the first step are compared with one process in float64.

It needs PyTorch and transformers: pip install -e '.[torch]'.

Exit code 0: done.  1: a loss, gradient or weight is no longer finite, or the first step is wrong.
2: bad input, or nothing can be written.
"""

from collections.abc import Callable
from functools import partial

from a2d_mpi.experiments.cli import add_grid, run_torch
from a2d_mpi.experiments.models import NAMES, model_name
from a2d_mpi.experiments.options import Parser, add_engine, add_options, path, real, tokens, whole

DTYPES = ("float32", "float64", "bfloat16")


def build(parser: Parser) -> Callable:
    """Add the options of this command, and return its body."""
    text = f"{', '.join(NAMES)}, or a folder of transformers"
    parser.add_argument("model", metavar="MODEL", type=model_name, help=text)
    parser.add_argument("text", metavar="TEXT", type=path, nargs="+", help="text files")
    group = parser.add_argument_group("texts")
    add_options(group, "separator", default=r"\n\n\n")
    text = "share of the documents to hold out, and to evaluate at the end"
    group.add_argument("--validate", type=real(0, 1), metavar="X", default=0.0, help=text)

    group = parser.add_argument_group("training")
    add = group.add_argument
    add_options(group, "seqlen", type=tokens(2), default="1K")
    text = "sequences of a step, one after the other"
    add("--accumulate", type=whole(1), metavar="N", default=1, help=text)
    text = "number of steps of the whole run"
    add("--steps", type=whole(1), metavar="N", default=200, help=text)
    add("--rate", type=real(0, 1e6), metavar="X", default=1e-3, help="highest learning rate")
    text = "steps until the learning rate is highest; then it falls as a cosine"
    add("--warmup-steps", dest="warmup", type=whole(1), metavar="N", default=20, help=text)
    text = "largest norm of a step's gradient; 0: no limit"
    add("--clip", type=real(0, 1e6), metavar="X", default=1.0, help=text)
    text = "storage dtype of weights; bfloat16: products in it (autocast), weights in float32"
    add_options(group, "dtype", choices=DTYPES, help=text)
    add_options(group, "checkpoint-layers")
    text = "compare the first step with one process in float64"
    add("--check", choices=("first", "none"), default="first", help=text)
    add_options(group, "seed")

    group = parser.add_argument_group("checkpoints and output")
    add = group.add_argument
    add("--folder", type=path, metavar="DIR", help="folder of checkpoints")
    add("--every", type=whole(1), metavar="N", default=50, help="steps between checkpoints")
    add_options(group, "resume", help="resume from the latest whole checkpoint")
    add_options(group, "output", help="HDF5 file for losses, seconds, traffic and options")
    add_options(add_grid(parser), "survive")
    add_engine(parser)
    return partial(run_torch, "train.train")
