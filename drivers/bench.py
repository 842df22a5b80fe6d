"""Rivals side by side: methods x grids x workloads, checked, timed in turn, in one HDF5 file.

    mpiexec -n 4 python drivers/bench.py --output results/bench.h5 --plans all \
        --seqlens 2048,4096 --masks full,causal --nheads 8 --nheads-kv 8,1 --headdim 64 \
        --backward --trials 5 --profile here.toml --resume

A plan is METHOD[:RxC[xU]][@order][/RxC]: "attention2d:2x2", "ring", "ring:2x1x2" (2 ranks share
the heads), "double ring:2x2" (2 outer steps over inner rings of 2), "striped ring", "node
aware:4x4/2x2" (in blocks of 2x2 ranks, which are neighbours); "all": every layout that the planner
knows; "auto": the planner's choice for --profile, "auto:5": and its next four, "auto:each": its
choice of each method.  Lists are separated by commas, and every combination is run.

All plans of a workload (mask, sizes, dtype) are made and checked first, then timed trial by
trial in turn, so that they meet the same machine.  When a workload is done, a new file with its
results takes the place of the old one: a job that is killed, however, leaves a whole file, and
loses the workload in progress.  --resume runs what is not there yet; other rank counts may add to
the same file.

Exit code 0: all checks passed, also those of an earlier run.  1: a check failed.  2: bad input, or
the output cannot be written.
"""

from functools import partial

from mpi4py import MPI

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.wire import FORMATS
from a2d_mpi.experiments.bench import OVERLAPS, SPANS, bench
from a2d_mpi.experiments.cli import Parser, add_engine, run
from a2d_mpi.experiments.options import (
    BLOCK_HELP,
    CHECK_HELP,
    HEADDIM,
    HEADDIM_V_HELP,
    HEADS,
    MASK_FILE_HELP,
    MASK_HELP,
    METHOD_HELP,
    ORDER_HELP,
    SEED,
    TRIALS,
    WARMUP,
    WIRE_HELP,
    add_trace,
    check_text,
    listed,
    masks,
    one_of,
    path,
    tokens,
)


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("bench.py", __doc__, comm)
    add = parser.add_argument
    add("--output", type=path, required=True, help="HDF5 file")
    add("--resume", action="store_true", help="add to the file what is not there yet")
    add(
        "--plans",
        default="all",
        help="METHOD[:RxC[xU]][@order][/RxC], all, auto, auto:5, auto:each (default %(default)s); "
        f"METHOD is {METHOD_HELP}; order, rcu by default: {ORDER_HELP}; after a slash: "
        f"{BLOCK_HELP}",
    )
    add("--seqlens", type=listed(tokens), default="2048", help="4096,64K (default %(default)s)")
    either = parser.add_mutually_exclusive_group()
    text = f"all, or {MASK_HELP} (default %(default)s)"
    either.add_argument("--masks", type=masks, default="causal", help=text)
    either.add_argument("--mask-file", type=path, help=MASK_FILE_HELP)
    add("--nheads", type=listed(HEADS), default="8", help="query heads (default %(default)s)")
    add("--nheads-kv", type=listed(HEADS), help="KV heads; default: as many as query heads")
    add("--headdim", type=listed(HEADDIM), default="64", help="of a head (default %(default)s)")
    add("--headdim-v", type=HEADDIM, help=HEADDIM_V_HELP)
    add("--dtypes", type=listed(one_of(DTYPES)), default="float32", help="default %(default)s")
    text = f"none (as they are), or {WIRE_HELP} (default %(default)s)"
    add("--wire", type=listed(one_of(["none", *FORMATS])), default="none", help=text)
    add("--backward", action="store_true", help="also the gradients")
    text = "off: communicate and compute in turn (default %(default)s)"
    add("--overlap", choices=OVERLAPS, default="on", help=text)
    add("--trials", type=TRIALS, default=5, help="timed runs of each (default %(default)s)")
    add("--warmup", type=WARMUP, default=1, help="runs before, 1 at least (default %(default)s)")
    check = partial(check_text, none=False)
    add("--check", type=check, default="sample", help=f"{CHECK_HELP}; default: sample")
    add("--spans", choices=SPANS, default="all", help="of which plans to keep what ranks did when")
    add_trace(parser, "of one run more of each plan that is timed")
    add("--seed", type=SEED, default=0, help="of the numbers, and of the rows that are checked")
    add(
        "--profile",
        type=path,
        help="TOML file of this machine, for predictions; see drivers/calibrate.py",
    )
    add_engine(parser)
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, bench)
