r"""Benchmark of attention: plans x workloads, checked, timed in turn, in one HDF5 file.

    mpiexec -n 4 python drivers/bench.py --output results/bench.h5 --seqlens 512 --plans all
    mpiexec -n 4 python drivers/bench.py --output results/bench.h5 --plans auto,ring \
        --seqlens 2048,4K --masks full,causal --nheads-kv 8,1 --backward \
        --profile results/here.toml --resume

Every combination of the lists is run.  All plans of a workload (mask, sizes, dtype) are made and
checked first.  Then they are timed trial by trial in turn, so that they meet the same machine.
When a workload is done, a new file with its results takes the place of the old file.  A job that
is killed leaves a whole file and loses only the workload in progress.  --resume runs what is
not there yet.  Other numbers of ranks may add to the same file.

Exit code 0: all checks passed, also the checks of an earlier run.  1: a check failed.  2: bad
input, or the output cannot be written.
"""

from functools import partial

from mpi4py import MPI

from a2d_mpi.experiments.bench import SPANS, bench
from a2d_mpi.experiments.cli import Parser, add_engine, run
from a2d_mpi.experiments.options import (
    PLANS_HELP,
    add_mask,
    add_options,
    add_trace,
    add_workloads,
    check_text,
)


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("bench.py", __doc__, comm, epilog=PLANS_HELP)
    add_mask(add_workloads(parser), "masks")

    group = parser.add_argument_group("plans")
    add_options(group, "plans", default="all")
    for name, value, text in (
        ("--overlap", True, "communicate while computing (default)"),
        ("--no-overlap", False, "communicate and compute in turn; with --overlap: run both"),
    ):
        group.add_argument(name, dest="overlaps", action="append_const", const=value, help=text)
    add_options(group, "profile")

    group = parser.add_argument_group("measurement and checks")
    add_options(group, "trials")
    add_options(group, "warmup", help="runs before the timed runs; at least one is made")
    add_options(group, "check", type=partial(check_text, none=False))
    add_options(group, "seed")

    group = parser.add_argument_group("output")
    add_options(group, "output", required=True)
    add_options(group, "resume")
    text = "plans whose time lines are kept in the file; picked: the planner's pick"
    group.add_argument("--spans", choices=SPANS, default="all", help=text)
    add_trace(group, "one more run of each plan")
    add_engine(parser)
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, bench)
