r"""List methods and grids for a problem on a machine, the fastest first.

    python drivers/plan.py --profile data/machines/h100-64x1.toml --ranks 64 --seqlen 1M \
        --nheads 96 --headdim 128 --mask causal --backward

Nothing is run, and no MPI is needed.  The table has a line for each plan:

  method, grid   rows x cols x ranks that share the heads
  order          the axes from nodes to ranks; "ucr": neighbouring ranks differ in r
  total, ...     seconds in all, and by part
  received       bytes that a rank receives
  by a node      bytes that a node gets from other nodes
  x bound        bytes over all ranks, as a multiple of the least that exact attention needs
                 without a head axis
  memory         of a rank
  the end        what the plan loses against the first plan

Exit code 0: done.  2: bad input, or no plan fits.
"""

from a2d_mpi.experiments.candidates import add_problem, plan
from a2d_mpi.experiments.options import (
    Parser,
    listed,
    method_name,
    run_serial,
    whole,
)
from a2d_mpi.experiments.sweep import PLANNED
from a2d_mpi.gpt.config import PRESETS
from a2d_mpi.schedules import METHODS


def build_parser() -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("plan.py", __doc__)
    add_problem(parser, PLANNED, needs_heads=False)
    group = parser.add_argument_group("plans and table")
    add = group.add_argument
    text = f"only these methods, from {', '.join(METHODS)}; default: all"
    add("--methods", type=listed(method_name), metavar="METHOD,...", help=text)
    text = "memory of a rank: 80GB, 80GiB; default: the memory in the profile"
    add("--memory", metavar="SIZE", help=text)
    text = f"also predict training steps of a model, with its heads: {', '.join(PRESETS)}"
    add("--gpt", choices=PRESETS, metavar="MODEL", help=text)
    add(
        "--recompute",
        action="store_true",
        help="with --gpt: keep less of each layer, and compute it again",
    )
    text = "best: simulate plans until the fastest is certain; all: simulate every plan"
    add("--simulate", choices=("best", "all"), default="best", help=text)
    add("--top", type=whole(0), metavar="N", default=20, help="number of plans to print; 0: all")
    return parser


if __name__ == "__main__":
    run_serial(build_parser, plan)
