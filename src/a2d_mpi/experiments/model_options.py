"""The options of a GPT's sizes."""

from __future__ import annotations

import argparse

from a2d_mpi.experiments.options import Parser, add_options, path, real, tokens, whole
from a2d_mpi.gpt.config import POSITIONS, PRESETS, GPTConfig

FLOATS = ("float32", "float64")  # storage dtypes of a model


def add_sizes(parser: Parser, **defaults: object) -> argparse._ArgumentGroup:
    """Add sizes of a model with their defaults.  Returns the group."""
    group = parser.add_argument_group("model")
    for name, default in defaults.items():
        add_options(group, name.replace("_", "-"), default=default)
    return group


def add_model(parser: Parser) -> argparse._ArgumentGroup:
    """Add the options of a GPT's sizes, see `model_of`; returns their group."""
    names = "layers", "width", "nheads", "nheads_kv", "headdim"
    group = add_sizes(parser, **dict.fromkeys(names))
    add = group.add_argument
    text = f"a model whose sizes are the defaults of the others: {', '.join(PRESETS)}"
    add("--preset", choices=PRESETS, metavar="MODEL", default="tiny", help=text)
    add("--positions", choices=POSITIONS, help="encoding of positions; default: the preset's")
    add("--recompute", action="store_true", help="keep less of each layer, and compute it again")
    return group


def add_training(parser: Parser) -> argparse._ArgumentGroup:
    """Add a text and how to train on it; returns the group of the options."""
    parser.add_argument("text", type=path, help="text file; its bytes are the tokens")
    group = parser.add_argument_group("training")
    add = group.add_argument
    add_options(group, "seqlen", type=tokens(2), default="1K", help="tokens per step: 1024, 64K")
    add_options(group, "separator", default=r"\n\n\n")
    add_options(group, "dtype", choices=FLOATS)
    add(
        "--steps", type=whole(1), metavar="N", default=200, help="number of steps of the whole run"
    )
    add("--rate", type=real(0, 1e6), metavar="X", default=1e-3, help="highest learning rate")
    add_options(group, "seed")
    return group


def model_of(args: argparse.Namespace, **sizes: int) -> GPTConfig:
    """Return the sizes of a model, from the options of `add_model` and from `sizes`.

    Raises
    ------
    ValueError
        If sizes do not fit each other.
    """
    names = ("layers", "width", "nheads", "nheads_kv", "headdim", "positions", "layer_pattern")
    given = {x: getattr(args, x) for x in names if getattr(args, x, None) is not None}
    preset = PRESETS[args.preset].stored  # without a headdim that follows from the others
    if preset["nheads_kv"] == preset["nheads"]:
        preset["nheads_kv"] = None
    return GPTConfig(**{**preset, **sizes, **given})
