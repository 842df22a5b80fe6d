"""Tables of a study of simulations.

    python drivers/scale.py data/results/scale/scale.h5 --tables model,picks

model     how far the planner's model is from SimGrid, by ranks and by families of plans
picks     the planner's pick of each workload against the fastest that was simulated
winners   milliseconds of the fastest plan of each family for which the ranks have the memory
networks  likewise by networks, of workloads that were simulated on several
slopes    the power of the ranks that fits the times of each family
costs     seconds and memory that the simulations took

Files are those of drivers/simulate.py, see jobs/scale.sh; the model and the picks are asked where
the model knows all: without oversubscription, slow ranks and slow ports.  Exit code 2: bad input.
"""

from a2d_mpi.experiments.options import Parser, path, run_serial
from a2d_mpi.experiments.scale_study import TABLES, scale_study


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("scale.py", __doc__)
    parser.add_argument("files", type=path, nargs="+", help="HDF5 files of drivers/simulate.py")
    parser.add_argument("--tables", default=",".join(TABLES), help="default %(default)s")
    return parser


if __name__ == "__main__":
    run_serial(build_parser, scale_study)
