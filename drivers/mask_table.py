"""Compare grids, the ring and placed blocks under many masks: bytes and balance; nothing is run.

    python drivers/mask_table.py --ranks 16 --seqlen 131072 --masks all
    python drivers/mask_table.py --output table.csv --picture table.png

For each mask and plan, METHOD or METHOD/DISTRIBUTION, the grid of any shape whose largest rank
moves the fewest bytes in a forward pass.  What the table in --output has already is not computed
again; --picture draws all that is in it.  No MPI is needed.
Exit code 2: bad input.
"""

import argparse

from a2d_mpi.experiments.mask_table import plan_text, print_table
from a2d_mpi.experiments.options import (
    MASK_HELP,
    SEED,
    Parser,
    listed,
    masks,
    path,
    run_serial,
    whole,
)
from a2d_mpi.figures.mask_plots import draw_table
from a2d_mpi.figures.pictures import check_picture, save

PLANS = [
    *(f"attention2d/{name}" for name in ("contiguous", "zigzag", "balanced")),
    "ring/balanced",
    "blocks",
]


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("mask_table.py", __doc__)
    add = parser.add_argument
    add("--masks", type=masks, default="all", help=f"all, or {MASK_HELP} (default %(default)s)")
    add("--ranks", type=whole(2, 1024), default=16, help="default %(default)s")
    add("--seqlen", type=whole(1, 1 << 22), default=131072, help="tokens (default %(default)s)")
    add(
        "--plans",
        type=listed(plan_text),
        default=PLANS,
        help="default: " + ",".join(PLANS),
    )
    add("--seeds", type=listed(SEED), default=[0],
        help="of masks that are drawn and name no seed: 0,1,2 (default 0)")  # fmt: skip
    add("--output", type=path, help="CSV file with the table, which is completed")
    add("--picture", type=path, help="PNG, SVG or PDF file")
    return parser


def table(args: argparse.Namespace) -> int:
    """Print, keep and draw the table; returns the exit code."""
    if args.picture:
        check_picture(args.picture)
    known = print_table(args)
    if args.picture:
        save(draw_table(known), args.picture)
    return 0


if __name__ == "__main__":
    run_serial(build_parser, table)
