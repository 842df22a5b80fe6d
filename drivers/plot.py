r"""Draw figures: results of other drivers, grids of ranks, masks and schedules.

    python drivers/plot.py results data/results/scaling.h5 --output results/figures
    python drivers/plot.py grid results/grid.png --rows 2 --cols 3
    python drivers/plot.py masks results/masks.png --masks causal,sliding_window
    python drivers/plot.py schedule results/schedules.png --ranks 4 --seqlen 4K --nheads 8 \
        --profile data/machines/a100-16x4.toml --plans attention2d:2x2,ring

It needs matplotlib: pip install -e '.[plot]'.  Nothing is run, and no MPI is needed.

Exit code 0: done.  2: bad input, or nothing could be drawn.
"""

import argparse
from collections.abc import Callable

from a2d_mpi.experiments.candidates import add_problem
from a2d_mpi.experiments.options import (
    PLANS_HELP,
    Parser,
    add_options,
    add_trace,
    listed,
    one_of,
    path,
    run_serial,
    tokens,
    whole,
)
from a2d_mpi.figures import grid_plots, mask_plots, schedule_plots
from a2d_mpi.figures.plots import FIGURES, OTHERS, PHASES, plot


def results(parser: Parser) -> None:
    """Draw figures of a file of bench.py, or of the other drivers below.

        python drivers/plot.py results data/results/scaling.h5 --output results/figures
        python drivers/plot.py results data/results/scaling.h5 --what scaling,bytes

    scaling   per cent of ideal scaling by number of ranks, from the fastest plan on the fewest
    phases    time of each plan, and its shares: compute, merge, wait (communication that nothing
              hid)
    bytes     what a rank receives by number of ranks: counted, by the formula, and the lower bound
    model     predicted against measured time, of all runs in the file
    timeline  what every rank of one run did when

    Figures of the files of other drivers:

    training     loss by tokens (train_gpt.py)
    kernels      speed of kernels and of PyTorch's (bench_kernel.py)
    steps        seconds of training steps by part, measured and predicted (bench_gpt.py train)
    lengths      seconds of linear and exact attention by tokens (bench_gpt.py linear)
    activations  memory by number of ranks (bench_gpt.py train)
    strong       per cent of ideal scaling by number of ranks (simulate.py)
    weak         likewise, with the same number of tokens per rank
    slopes       time by number of ranks, with the power of the ranks that fits each method's times
    exposed      share of the time that ranks wait (simulate.py)
    winners      the fastest method by ranks and tokens (simulate.py)
    crossover    gain over the ring by computing over transfers (folder of run.py study, crossover)
    trace        what every rank did when, and all messages (a file of any driver's --trace)

    Each figure is written as PNG and as SVG, at most 16 cm wide.  The fastest plan of a method at
    each number of ranks stands for the method (in bytes, the plan that receives least).  A marker
    is full if ranks share the heads.  If the file has no data for a figure, the figure is left out
    and a line on stderr says so.
    """
    text = "file of a driver, or of --trace, or a folder"
    parser.add_argument("results", type=path, help=text)
    add = parser.add_argument_group("figures").add_argument
    add("--output", dest="folder", type=path, metavar="DIR", default="results/figures",
        help="folder for the figures")  # fmt: skip
    text = f"figures with commas between them; of other files: {', '.join(OTHERS)}"
    kind = listed(one_of([*FIGURES, *OTHERS]))
    add("--what", type=kind, metavar="FIGURE,...", default=",".join(FIGURES), help=text)
    add(
        "--format",
        type=listed(one_of(("png", "svg"))),
        metavar="FORMAT,...",
        default="png,svg",
        help="png, svg or both",
    )
    text = "name of a workload in the file; default: the one with the most numbers of ranks"
    add("--workload", metavar="NAME", help=text)
    text = "number of ranks in phases and timeline; default: the largest number"
    add("--ranks", type=whole(1), metavar="N", help=text)
    add("--phase", choices=PHASES, default="both", help="phase to plot")
    text = "name of the run of the timeline; default: the fastest Attention2D"
    add("--run", metavar="NAME", help=text)


def grid(parser: Parser) -> None:
    """Draw who computes what: the attention matrix coloured by rank, and the process grid.

        python drivers/plot.py grid results/grid.png --rows 2 --cols 3 --mask causal

    Left: the visible pairs, query by key, in the colour of the rank that computes them.  Right:
    the ranks, their share of the work, and what they exchange.
    """
    group = _add_picture(parser, tokens(most=grid_plots.LONGEST), 72)
    add_options(group, "mask")


def masks(parser: Parser) -> None:
    """Draw masks, and who computes what with each of them on a process grid.

        python drivers/plot.py masks results/masks.png --rows 2 --cols 3

    For each mask a pair of panels, query by key.  Left: the visible pairs.  Right: the same pairs
    in the colour of the rank that computes them: the rank in the row of the query's owner and the
    column of the key's owner.  Below: the distribution, and the largest area of a rank / mean.
    """
    group = _add_picture(parser, tokens(most=mask_plots.LONGEST), 96)
    add_options(group, "masks", default="all")


def _add_picture(
    parser: Parser, kind: Callable[[str], int], seqlen: int
) -> argparse._ArgumentGroup:
    """Add the options of both `grid` and `masks`; return their group."""
    parser.add_argument("output", type=path, help="PNG, SVG or PDF file")
    group = parser.add_argument_group("what to draw")
    ranks = whole(1, mask_plots.RANKS)
    add_options(group, "rows", type=ranks, default=2, help="rows of the grid")
    add_options(group, "cols", type=ranks, default=3, help="columns of the grid")
    add_options(
        group, "distribution", help="distribution of tokens over ranks; default: the mask's own"
    )
    add_options(group, "seqlen", type=kind, default=seqlen)
    return group


def schedule(parser: Parser) -> None:
    r"""Draw schedules: who computes what, who talks to whom, and what every rank does when.

        python drivers/plot.py schedule results/schedules.png --ranks 16 --seqlen 32K --nheads 32 \
            --nheads-kv 8 --profile data/machines/a100-16x4.toml \
            --plans "attention2d:4x4,ring,double ring:4x4"

    A row for each plan.  Left: the (query, key) pairs of a short sequence, in the colour of the
    rank that computes them.  Hidden pairs are grey.  Ranks that share the heads have stripes.
    Middle: bytes that a rank receives from each other rank, phase by phase.  Right: the
    predicted time of every rank by part, phase by phase.  Ranks are counted as MPI counts them:
    neighbours share nodes, whose ranks have shades of one colour.  --trace FILE writes the same
    times for Perfetto, with all kernel calls and messages.
    """
    parser.epilog = PLANS_HELP
    parser.add_argument("output", type=path, help="PNG, SVG or PDF file")
    add_problem(parser, schedule_plots.RANKS)
    group = parser.add_argument_group("plans")
    text = f"at most {schedule_plots.PLANS} plans, see the end of this help"
    add_options(group, "plans", default="auto:each", help=text)
    add_trace(group, "all plans with the predicted times, one after the other")


JOBS = {
    "results": plot,
    "grid": grid_plots.plot_grid,
    "masks": mask_plots.plot_masks,
    "schedule": schedule_plots.plot_schedule,
}


def build_parser() -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("plot.py", __doc__)
    parser.add_commands(results, grid, masks, schedule)
    return parser


if __name__ == "__main__":
    run_serial(build_parser, lambda args: JOBS[args.command](args))
