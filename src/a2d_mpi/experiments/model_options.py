"""The options of a GPT's sizes."""

from __future__ import annotations

import argparse
from dataclasses import replace

from a2d_mpi.experiments.options import HEADS, Parser, whole
from a2d_mpi.gpt.config import POSITIONS, PRESETS, GPTConfig

LAYERS, WIDTH = whole(1, 4096), whole(1, 1 << 20)
BLOCK = whole(1, 1 << 20)  # tokens of a block of the cache


def add_model(parser: Parser, default: str | None) -> None:
    """Add the options of a GPT's sizes; see `model_of`."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, default=default, help="default %(default)s")
    sizes = {"layers": LAYERS, "width": WIDTH, "nheads": HEADS, "nheads-kv": HEADS}
    for name, kind in sizes.items():
        add(f"--{name}", type=kind, help="default: the preset's")
    add("--positions", choices=POSITIONS, help="default: the preset's")
    add("--recompute", action="store_true", help="keep less of each block, compute it again")


def model_of(args: argparse.Namespace, **sizes: int) -> GPTConfig:
    """The sizes of the options of `add_model`, and these.

    Raises
    ------
    ValueError
        If they do not fit each other.
    """
    names = ("layers", "width", "nheads", "nheads_kv", "positions", "layer_pattern")
    given = {x: getattr(args, x) for x in names if getattr(args, x, None) is not None}
    if {"width", "nheads"} & given.keys():
        given = {"nheads_kv": None, **given}
    return replace(PRESETS[args.preset], **sizes, **given)
