"""Measure the machine that this runs on and write its profile for drivers/plan.py.

    mpiexec -n 4 python drivers/calibrate.py --output results/here.toml

Run it as the job will run: as many ranks, on as many nodes (told apart by hostname).  All ranks
measure at once, so the figures are those of a busy machine: ranks that share cores (namespaces on
one host are found, too) or NICs each get their part.  Kernels: several shapes, by the kernel that
such a job takes; the profile says which one, with which BLAS.
A link that these ranks do not have (one node, or one rank on each) is left out of the profile,
which then does for ranks that do not need it.

The output and the profile say by how much the same kernel calls differed.  If by more than 20 %,
they say that other work disturbed them: measure once more then.
Exit code 2: bad input, or the output cannot be written.
"""

from mpi4py import MPI

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.experiments.calibrate import calibrate
from a2d_mpi.experiments.cli import Parser, run
from a2d_mpi.experiments.options import THREADS, path, real


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser("calibrate.py", __doc__, comm)
    add = parser.add_argument
    add("--output", type=path, required=True, help="TOML file to write")
    add("--name", help="of the machine; default: its first host")
    add(
        "--seconds",
        type=real(1e-3, 86400),
        default=30.0,
        help="of a measurement, about (default %(default)s)",
    )
    add("--dtype", choices=DTYPES, action="append", help="default: float32; may be repeated")
    add("--kernel", choices=("auto", "numpy", "numba"), default="auto",
        help="default: the fastest that is installed")  # fmt: skip
    add("--threads", type=THREADS, default=1, help="BLAS threads per rank (default %(default)s)")
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, calibrate)
