"""The files of a study, made by jobs/study.sh or jobs/scale.sh, in tables.

    python drivers/study.py data/results/*.h5
    python drivers/study.py --simulated data/results/scale/*.h5

For every workload of a file a line for each plan, forward and forward with backward: milliseconds
of the slowest rank in the median trial, their ratio to those of the planner's pick (if there is
none, to the fastest), the wait, the time that the model predicted, and the bytes that the busiest
rank received.  For every file, and for all: how far the model was off, and how many picks take at
most 1.1 times the fastest.  --simulated: files of drivers/simulate.py; "wait" is the mean of all
ranks, and plans that do not fit in the memory of the ranks are left out.
Exit code 1: a check of some result failed; 2: bad input.
"""

from a2d_mpi.experiments.options import Parser, path, run_serial
from a2d_mpi.experiments.study import study


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("study.py", __doc__)
    parser.add_argument("files", type=path, nargs="+", help="HDF5 files of drivers/bench.py")
    parser.add_argument("--simulated", action="store_true", help="of drivers/simulate.py instead")
    return parser


if __name__ == "__main__":
    run_serial(build_parser, study)
