"""The options of a GPT's sizes."""

from __future__ import annotations

import argparse

from a2d_mpi.experiments.options import HEADDIM, HEADS, Parser, whole
from a2d_mpi.gpt.config import POSITIONS, PRESETS, GPTConfig

LAYERS, WIDTH = whole(1, 4096), whole(1, 1 << 20)
BLOCK = whole(1, 1 << 20)  # tokens of a block of the cache


def add_model(parser: Parser, default: str | None) -> None:
    """Add the options of a GPT's sizes; see `model_of`."""
    add = parser.add_argument
    add("--preset", choices=PRESETS, default=default, help="default %(default)s")
    sizes = {"layers": LAYERS, "width": WIDTH, "nheads": HEADS, "nheads-kv": HEADS}
    sizes["headdim"] = HEADDIM
    for name, kind in sizes.items():
        add(f"--{name}", type=kind, help="default: the preset's")
    add("--positions", choices=POSITIONS, help="default: the preset's")
    add("--recompute", action="store_true", help="keep less of each block, compute it again")


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
