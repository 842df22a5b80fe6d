"""Print tables: results of bench.py, results of simulate.py, or partitions under many masks.

    python drivers/report.py study data/results/ratio.h5
    python drivers/report.py scale data/results/scale/links.h5
    python drivers/report.py masks --ranks 4 --seqlen 4K --masks causal,sliding_window

Nothing is run, and no MPI is needed.

Exit code 0: done.  1: a check of some result failed.  2: bad input.
"""

import argparse

from a2d_mpi.experiments.mask_table import plan_text, print_table
from a2d_mpi.experiments.options import (
    SEED,
    Parser,
    add_options,
    listed,
    path,
    run_serial,
    tokens,
    whole,
)
from a2d_mpi.experiments.simulate import read_summaries
from a2d_mpi.experiments.study import print_study, read_measured
from a2d_mpi.figures.mask_plots import draw_table
from a2d_mpi.figures.pictures import check_picture, save

PLANS = [
    *(f"attention2d/{name}" for name in ("contiguous", "zigzag", "balanced")),
    "ring/balanced",
]


def study(parser: Parser) -> None:
    """Print results of bench.py, as `jobs/run.py study` makes them.

        python drivers/report.py study data/results/ratio.h5
        python drivers/report.py study data/results/*.h5

    Every workload of a file has a line for each plan, forward and forward with backward.  The
    line has milliseconds of the slowest rank in the median trial, and their ratio to the planner's
    pick.  Without a pick it is the ratio to the fastest plan.  Then come the wait, the time that
    the model predicted, and the bytes that the busiest rank received.
    The last lines say how far the model was off, and how many picks take at most 1.1 times the
    fastest.
    """
    parser.add_argument("files", type=path, nargs="+", help="HDF5 files of bench.py")


def scale(parser: Parser) -> None:
    """Print results of simulate.py, as `jobs/run.py scale` makes them.

        python drivers/report.py scale data/results/scale/links.h5

    The table has the columns of "study", with simulated times.  The wait is the mean over all
    ranks.  Plans that do not fit in the memory of the ranks are left out.
    """
    parser.add_argument("files", type=path, nargs="+", help="HDF5 files of simulate.py")


def masks(parser: Parser) -> None:
    """Compare grids and the ring under many masks: bytes and balance.

        python drivers/report.py masks --ranks 16 --seqlen 128K --masks all
        python drivers/report.py masks --output table.csv --picture table.png

    For each mask and plan, METHOD or METHOD/DISTRIBUTION, the grid of any shape whose busiest rank
    moves the fewest bytes in a forward pass.  Entries of the table in --output are not computed
    again.  --picture draws the whole table.
    """
    group = parser.add_argument_group("masks and plans")
    add = group.add_argument
    add_options(group, "masks", default="all")
    add("--ranks", type=whole(2, 1024), metavar="N", default=16, help="ranks")
    add_options(group, "seqlen", type=tokens(most=1 << 22), default="128K")
    text = "METHOD or METHOD/DISTRIBUTION"
    add_options(group, "plans", type=listed(plan_text), default=",".join(PLANS), help=text)
    text = "seeds of masks that are drawn and name no seed: 0,1,2"
    add("--seeds", type=listed(SEED), metavar="N,...", default="0", help=text)
    group = parser.add_argument_group("output")
    add_options(group, "output", help="CSV file with the table, which is completed")
    group.add_argument("--picture", type=path, metavar="FILE", help="PNG, SVG or PDF file")


def table(args: argparse.Namespace) -> int:
    """Print, keep and draw the table; returns the exit code."""
    if args.picture:
        check_picture(args.picture)
    known = print_table(args)
    if args.picture:
        save(draw_table(known), args.picture)
    return 0


JOBS = {
    "study": lambda args: print_study(args.files, read_measured),
    "scale": lambda args: print_study(args.files, read_summaries),
    "masks": table,
}


def build_parser() -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("report.py", __doc__)
    parser.add_commands(study, scale, masks)
    return parser


if __name__ == "__main__":
    run_serial(build_parser, lambda args: JOBS[args.command](args))
