r"""Draw figures and print tables: results of other commands, grids of ranks, masks and schedules.

    python -m a2d_mpi plot results data/results/scaling.h5 results/phases.png
    python -m a2d_mpi plot grid results/grid.png --rows 2 --cols 3
    python -m a2d_mpi plot masks results/masks.png --masks causal,sliding_window
    python -m a2d_mpi plot schedule results/schedules.png --ranks 4 --seqlen 4K --nheads 8 \
        --profile data/machines/a100-16x4.toml --plans attention2d:2x2,ring
    python -m a2d_mpi plot study data/results/ratio.h5

Figures need matplotlib: pip install -e '.[plot]'.  Nothing is run, and no MPI is needed.

Exit code 0: done.  1: a check of some result failed.  2: bad input, or nothing could be drawn.
"""

import argparse
from collections.abc import Callable

from a2d_mpi.cli.options import Parser, add_options, path, tokens, whole
from a2d_mpi.cli.workloads import add_list, add_plans

PICTURE = "PNG, SVG or PDF file"


def results(parser: Parser) -> Callable:
    """Draw a figure of a file of bench, or of the other commands below.

        python -m a2d_mpi plot results data/results/scaling.h5 results/phases.png

    phases       time of each plan, and its shares: compute, merge, wait (communication that
                 nothing hid); from a file of bench
    kernels      speed of kernels and of PyTorch's (bench kernels)
    crossover    gain over the ring by computing over transfers (folder of run.py study crossover)

    The figure is at most 16 cm wide.  A marker is full if ranks share the heads.
    """
    from a2d_mpi.figures.plots import FIGURES, plot

    parser.add_argument("results", type=path, help="file of a driver, or a folder")
    parser.add_argument("output", type=path, help=PICTURE)
    add = parser.add_argument_group("what to draw").add_argument
    add("--what", choices=FIGURES, default="phases", help="the figure, see above")
    text = "name of a workload in the file; default: the one with the most runs"
    add("--workload", metavar="NAME", help=text)
    text = "number of ranks in phases; default: the largest number"
    add("--ranks", type=whole(1), metavar="N", help=text)
    return plot


def grid(parser: Parser) -> Callable:
    """Draw who computes what: the attention matrix coloured by rank, and the process grid.

        python -m a2d_mpi plot grid results/grid.png --rows 2 --cols 3 --mask causal

    Left: the visible pairs, query by key, in the colour of the rank that computes them.  Right:
    the ranks, their share of the work, and what they exchange.
    """
    from a2d_mpi.figures.mask_plots import plot_grid

    add_options(_add_picture(parser, 72), "mask")
    return plot_grid


def masks(parser: Parser) -> Callable:
    """Draw masks, and who computes what with each of them on a process grid.

        python -m a2d_mpi plot masks results/masks.png --rows 2 --cols 3

    For each mask a pair of panels, query by key.  Left: the visible pairs.  Right: the same pairs
    in the colour of the rank that computes them: the rank in the row of the query's owner and the
    column of the key's owner.  Below: the distribution, and the largest area of a rank / mean.
    """
    from a2d_mpi.figures.mask_plots import plot_masks

    add_list(_add_picture(parser, 96), "masks", "mask", default="all")
    return plot_masks


def _add_picture(parser: Parser, seqlen: int) -> argparse._ArgumentGroup:
    """Add the options of both `grid` and `masks`; return their group."""
    from a2d_mpi.figures.mask_plots import LONGEST

    parser.add_argument("output", type=path, help=PICTURE)
    group = parser.add_argument_group("what to draw")
    add_options(group, "rows", default=2, help="rows of the grid")
    add_options(group, "cols", default=3, help="columns of the grid")
    add_options(
        group, "distribution", help="distribution of tokens over ranks; default: the mask's own"
    )
    add_options(group, "seqlen", type=tokens(most=LONGEST), default=seqlen)
    return group


def schedule(parser: Parser) -> Callable:
    r"""Draw schedules: who computes what, who talks to whom, and what every rank does when.

        python -m a2d_mpi plot schedule results/schedules.png --ranks 16 --seqlen 32K --nheads 32 \
            --nheads-kv 8 --profile data/machines/a100-16x4.toml \
            --plans "attention2d:4x4,ring,double ring:4x4"

    A row for each plan.  Left: the (query, key) pairs of a short sequence, in the colour of the
    rank that computes them.  Hidden pairs are grey.  Ranks that share the heads have stripes.
    Middle: bytes that a rank receives from each other rank, phase by phase.  Right: the
    predicted time of every rank by part, phase by phase.  Ranks are counted as MPI counts them:
    neighbours share nodes, whose ranks have shades of one colour.
    """
    from a2d_mpi.cli.workloads import add_problem
    from a2d_mpi.figures import schedule_plots

    parser.add_argument("output", type=path, help=PICTURE)
    add_problem(parser, schedule_plots.RANKS)
    group = parser.add_argument_group("plans")
    text = f"at most {schedule_plots.PLANS} plans, see the end of this help"
    add_plans(parser, group, default="auto:each", help=text)
    return schedule_plots.plot_schedule


def study(parser: Parser) -> Callable:
    """Print results of bench, as jobs/run.py study makes them.

        python -m a2d_mpi plot study data/results/ratio.h5
        python -m a2d_mpi plot study data/results/*.h5

    Every workload of a file has a line for each plan, of all phases that ran.  The line has
    milliseconds of the slowest rank in the median trial, and their ratio to the planner's pick.
    Without a pick it is the ratio to the fastest plan.  Then come the wait, the time that the
    model predicted, and the bytes that the busiest rank received.  The last lines say how far the
    model was off, and how many picks take at most 1.1 times the fastest.
    """
    from a2d_mpi.results.tables import print_study, read_measured

    parser.add_argument("files", type=path, nargs="+", help="HDF5 files of bench")
    return lambda args: print_study(args.files, read_measured)


def scale(parser: Parser) -> Callable:
    """Print results of plan simulate, as jobs/run.py scale makes them.

        python -m a2d_mpi plot scale data/results/scale/links.h5

    The table has the columns of "study", with simulated times.  The wait is the mean over all
    ranks.  Plans that do not fit in the memory of the ranks are left out.
    """
    from a2d_mpi.commands.plan import read_summaries
    from a2d_mpi.results.tables import print_study

    parser.add_argument("files", type=path, nargs="+", help="HDF5 files of plan simulate")
    return lambda args: print_study(args.files, read_summaries)


COMMANDS, DEFAULT = (results, grid, masks, schedule, study, scale), None
