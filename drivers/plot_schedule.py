"""Draw schedules: who computes what, who talks to whom, and what every rank does when.

    pip install -e '.[plot]'
    python drivers/plot_schedule.py results/schedules.png \
        --profile data/machines/a100-16x4.toml --ranks 16 --seqlen 32K --nheads 32 \
        --nheads-kv 8 --mask causal --plans "attention2d:4x4,ring,double ring:4x4"

A row for each plan.  Left: the (query, key) pairs of a short sequence, in the colour of the rank
that computes them; hidden pairs are grey; of ranks that share the heads each has stripes.  Middle:
bytes that a rank receives from each other one, phase by phase.  Right: the predicted time of every
rank by part, phase by phase.  Ranks are counted as MPI counts them: neighbours share nodes, whose
ranks have shades of one colour.  --trace FILE writes the same times for Perfetto, with all kernel
calls and messages.  Nothing is run; no MPI is needed.  Exit code 2: bad input.
"""

from a2d_mpi.experiments.candidates import add_problem
from a2d_mpi.experiments.options import (
    BLOCK_HELP,
    METHOD_HELP,
    ORDER_HELP,
    Parser,
    add_trace,
    path,
    run_serial,
)
from a2d_mpi.figures.schedule_plots import PLANS, RANKS, plot_schedule


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("plot_schedule.py", __doc__)
    parser.add_argument("output", type=path, help="PNG, SVG or PDF file")
    add_problem(parser, RANKS)
    add_trace(parser, "all plans with the predicted times, one after the other")
    parser.add_argument(
        "--plans",
        default="auto:each",
        help="METHOD[:RxC[xU]][@order][/RxC], all, auto, auto:5, auto:each (default %(default)s), "
        f"with commas, at most {PLANS}; METHOD is {METHOD_HELP}; order, rcu by default: "
        f"{ORDER_HELP}; after a slash: {BLOCK_HELP}",
    )
    return parser


if __name__ == "__main__":
    run_serial(build_parser, plot_schedule)
