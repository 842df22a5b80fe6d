r"""Train a model of transformers on texts by its Trainer, each sequence spread over the ranks.

    mpiexec -n 4 python -m a2d_mpi train llama-tiny data/new_testament.txt --rows 2 --cols 2 \
        --folder results/tiny --steps 200 --output results/tiny.h5 --set learning_rate=4e-3

MODEL is a small random model by its name, or a folder of transformers.  If the folder has no
weights, they are random.  If it has no tokenizer, tokens are bytes.  Packed documents end at
--separator, and do not see each other.  --set gives any argument of transformers'
TrainingArguments; without it the rate is 1e-3, a cosine after 20 steps, with a checkpoint every 50
steps.  --resume continues a run from its latest checkpoint, bit for bit as without a break on the
same grid and CPU.  After the loss of ranks --survive does the same on a smaller grid.  Loss and
gradients of the first step are compared with one process in float64.

It needs PyTorch and transformers: pip install -e '.[torch]'.

Exit code 0: done.  1: a loss or gradient is no longer finite, or the first step is wrong.  2: bad
input, or nothing can be written.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from a2d_mpi.cli.models import NAMES, model_name, run_torch
from a2d_mpi.cli.options import (
    BadOption,
    Parser,
    add_engine,
    add_options,
    form,
    path,
    real,
    tokens,
    whole,
)
from a2d_mpi.cli.run import add_grid

DTYPES = ("float32", "float64", "bfloat16")


def argument(name: str, text: str) -> tuple[str, object]:
    """Return an argument's name and its value: one of JSON, or else the text."""
    with suppress(ValueError):
        return name, json.loads(text)
    return name, {"True": True, "False": False, "None": None}.get(text, text)


def escaped(text: str) -> bytes:
    r"""Parse an option that is text with Python's escapes, such as \n; return bytes."""
    try:
        return text.encode().decode("unicode_escape").encode("latin-1")
    except UnicodeError:
        raise BadOption(f"must be text with Python's escapes, got {text[:40]!r}") from None


def build(parser: Parser) -> Callable:
    """Add the options of this command, and return its body."""
    text = f"{', '.join(NAMES)}, or a folder of transformers"
    parser.add_argument("model", metavar="MODEL", type=model_name, help=text)
    parser.add_argument("text", metavar="TEXT", type=path, nargs="+", help="text files")
    group = parser.add_argument_group("texts")
    text = "text between two documents; empty: the whole text is one document"
    group.add_argument("--separator", type=escaped, metavar="TEXT", default=r"\n\n\n", help=text)
    text = "share of the documents to hold out, and to evaluate at the end"
    group.add_argument("--validate", type=real(0, 1), metavar="X", default=0.0, help=text)

    group = parser.add_argument_group("training")
    add_options(group, "seqlen", type=tokens(2), default="1K")
    text = "number of steps of the whole run"
    group.add_argument("--steps", type=whole(1), metavar="N", default=200, help=text)
    text = "storage dtype of weights; bfloat16: products in it (autocast), weights in float32"
    add_options(group, "dtype", choices=DTYPES, help=text)
    text = "an argument of TrainingArguments: learning_rate=4e-3; may be repeated"
    group.add_argument("--set", type=form("NAME=VALUE", r"(\w+)=(.*)", argument), default=[],
                       action="append", metavar="NAME=VALUE", help=text)  # fmt: skip
    text = "compare the first step with one process in float64"
    group.add_argument("--check", choices=("first", "none"), default="first", help=text)
    add_options(group, "seed")

    group = parser.add_argument_group("checkpoints and output")
    group.add_argument("--folder", type=path, metavar="DIR", help="folder of checkpoints")
    add_options(group, "resume", help="resume from the latest checkpoint")
    add_options(group, "output", help="HDF5 file for losses, seconds, traffic and options")
    add_options(add_grid(parser), "survive")
    add_engine(parser)
    return partial(run_torch, "train_job.train")
