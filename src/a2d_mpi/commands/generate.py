r"""Generate text with a model of transformers, with the KV cache spread over the ranks.

    mpiexec -n 4 python -m a2d_mpi generate results/tiny --prompt "To be" --prompt "The " \
        --tokens 200 --temperature 0.8

MODEL is a folder of transformers, with config, weights and tokenizer; a folder of checkpoints of
train, of which the latest whole one is taken; or the name of a small random model.  Without a
tokenizer, tokens are bytes.  Prompts are answered one after the other, and their tokens are
printed as they come.  --room limits the tokens that each rank keeps.  In the file of --output a
group for each prompt has the seconds of the prefill (with the first token) and of each further
token, and by rank the bytes of the cache and those that are sent for a token.

It needs PyTorch and transformers: pip install -e '.[torch]'.

Exit code 0: all prompts were answered.  2: bad input.
"""

from collections.abc import Callable
from functools import partial

from a2d_mpi.cli.models import NAMES, model_name, run_torch
from a2d_mpi.cli.options import (
    Parser,
    add_engine,
    add_options,
    listed,
    path,
    real,
    tokens,
    whole,
)
from a2d_mpi.cli.run import add_grid


def build(parser: Parser) -> Callable:
    """Add the options of this command, and return its body."""
    text = f"folder of transformers, folder of checkpoints, or {', '.join(NAMES)}"
    parser.add_argument("model", metavar="MODEL", type=model_name, help=text)
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
    group = parser.add_argument_group("cache and output")
    text = "most tokens that each rank keeps: 900,900,400; default: no limit"
    group.add_argument("--room", type=listed(whole(0)), metavar="N,...", help=text)
    text = "HDF5 file for seconds, tokens/s, bytes and options"
    add_options(group, "output", help=text)
    add_options(add_grid(parser), "survive")
    add_engine(parser)
    return partial(run_torch, "generate_session.generate")
