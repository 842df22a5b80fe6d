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

from collections.abc import Callable

from a2d_mpi.experiments.autotune import calibrate
from a2d_mpi.experiments.options import Parser, add_options, real
from a2d_mpi.experiments.sweep import add_list


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
