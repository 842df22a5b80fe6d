"""The methods and grids for a problem on a machine, fastest first.

    python drivers/plan.py --profile data/machines/h100-64x1.toml --ranks 64 --seqlen 1M \
        --nheads 96 --headdim 128 --mask causal --backward

Prints all plans that fit, fastest first: method, rows x cols x heads, the order of the axes from
nodes to ranks ("ucr": neighbouring ranks differ in r), seconds in all and by part, what a rank
receives and a node gets from other nodes, the bytes over all ranks as a multiple of the least
that exact attention needs without a head axis, the memory of a rank, and what each loses against
the first.  Nothing is run; no MPI is needed.  Exit code 2: bad input, or no plan fits.
"""

from a2d_mpi.experiments.candidates import add_problem, plan
from a2d_mpi.experiments.options import Parser, run_serial, whole
from a2d_mpi.experiments.sweep import PLANNED
from a2d_mpi.gpt.config import PRESETS
from a2d_mpi.schedules import METHODS


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("plan.py", __doc__)
    add_problem(parser, PLANNED)
    add = parser.add_argument
    add("--method", choices=METHODS, action="append", help="only this one; may be repeated")
    add("--memory", help="of a rank: 80GB, 80GiB; default: what the profile says")
    add("--gpt", choices=PRESETS, help="also training steps of this model, whose heads these are")
    add("--recompute", action="store_true", help="with --gpt: blocks keep less")
    add(
        "--simulate",
        choices=("best", "all"),
        default="best",
        help="best: until the fastest plan is certain, all: every plan (default %(default)s)",
    )
    add("--top", type=whole(0), default=20, help="lines to print, 0: all (default %(default)s)")
    return parser


if __name__ == "__main__":
    run_serial(build_parser, plan)
