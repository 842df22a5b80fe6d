"""Measure the machine that this runs on, and write its profile for the planner.

    mpiexec -n 4 python -m a2d_mpi calibrate --output results/here.toml

Run it as the job will run: as many ranks, on as many nodes (told apart by hostname).  All ranks
measure at once, as on a busy machine.  Ranks that share cores or NICs each get their part;
namespaces on one host are found, too.  The kernel that a job takes by default is measured with
several shapes.  The profile names this kernel and its BLAS.
A link that these ranks do not have (one node, or one rank on each) is left out of the profile.
The profile then serves ranks that do not need the link.

The output and the profile say by how much the same kernel calls differed.  If they differed by
more than 20 %, other work disturbed them: measure once more then.

Exit code 0: the profile is written.  2: bad input, or the output cannot be written.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from a2d_mpi.checks.autotune import measure
from a2d_mpi.cli.options import Parser, add_options, real
from a2d_mpi.cli.run import together
from a2d_mpi.cli.workloads import add_list
from a2d_mpi.core.atomic import check_writable
from a2d_mpi.planning.profile import read_machine, write_machine


def build(parser: Parser) -> Callable:
    """Add the options of this command, and return its body."""
    group = parser.add_argument_group("measurement")
    group.add_argument("--seconds", type=real(1e-3, 86400), metavar="S", default=30.0,
                       help="approximate time to measure")  # fmt: skip
    # The defaults of plans and of workloads.
    add_list(group, "dtypes", "dtype", default="float32,bfloat16")
    group = parser.add_argument_group("output")
    add_options(group, "output", required=True, help="TOML file to write")
    text = "name of the machine; default: the name of its first node"
    group.add_argument("--name", metavar="TEXT", help=text)
    return calibrate


def calibrate(comm: MPI.Intracomm, args: argparse.Namespace) -> int:
    """Measure and write the profile; return the exit code."""
    together(comm, lambda: check_writable(args.output, 1 << 16, read_machine), on=0)
    machine, notes = measure(comm, args.dtypes, args.seconds, args.name)
    lines = [
        f"Measured {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC by drivers/calibrate.py",
        f"{MPI.Get_library_version().splitlines()[0][:60]}; numpy {np.__version__}",
        *notes,
    ]
    together(comm, lambda: write_machine(args.output, machine, "\n".join(lines)), on=0)
    if comm.rank == 0:
        print("\n".join((*notes, f"written to {args.output}")), flush=True)
    return 0
