"""The files of a study, made by jobs/study.sh, in a few tables.

    python drivers/study.py data/results/*.h5

For every workload of a file: the ring against the squarest pure grid in seconds and bytes, how
many times faster than the ring the planner's pick is, and than the fastest of all others; for
every file, how far the model was off.  For a workload on several numbers of ranks: what a rank
receives in the forward pass, in elements over N nheads headdim, counted and by the formulas.
"match": on how many tokens the paper's machine of that shape (data/machines/) computes as long, in
relation to what it transfers, as the ring did here.  Seconds are those of the slowest rank in the
median trial.  Exit code 1: a check of some result failed; 2: bad input.
"""

from pathlib import Path

from a2d_mpi.experiments.options import Parser, path, run_serial
from a2d_mpi.experiments.study import study


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("study.py", __doc__)
    parser.add_argument("files", type=path, nargs="+", help="HDF5 files of drivers/bench.py")
    parser.add_argument("--markdown", action="store_true", help="the picks as a table, too")
    parser.set_defaults(machines=Path(__file__).parents[1] / "data" / "machines")
    return parser


if __name__ == "__main__":
    run_serial(build_parser, study)
