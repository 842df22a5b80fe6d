"""Draw what drivers/bench.py, bench_kernel.py, bench_train.py, train_gpt.py or simulate.py found.

    python drivers/plot.py results/bench.h5 --output results/figures --what scaling,bytes

scaling   time by number of ranks, with per cent of ideal scaling of the fastest on the fewest
phases    where the time of each plan goes: compute, merge, wait (communication that nothing hid)
bytes     what a rank receives by number of ranks: counted, by the formula, and the lower bound
model     predicted against measured time, of all runs in the file
timeline  what every rank of one run did when

Alone, of files of other drivers:
training     loss by tokens (drivers/train_gpt.py)
kernels      speed of kernels and of PyTorch's (drivers/bench_kernel.py)
steps        seconds of training steps by part, measured and predicted (drivers/bench_train.py)
activations  memory by number of ranks (drivers/bench_train.py)
strong       time by number of ranks, with per cent of ideal scaling (drivers/simulate.py)
weak         likewise, with as many tokens a rank
slopes       the same, with the power of the ranks that fits each method's times
exposed      share of the time that ranks wait (drivers/simulate.py)
winners      the fastest method by ranks and tokens (drivers/simulate.py)
crossover    gain over the ring by computing over transfers (folder of jobs/study.sh crossover)
trace        what every rank did when, and all messages (a file of any driver's --trace)

Each is written as PNG and as SVG, 8 cm wide.  Of the plans of a method the fastest one at each
number of ranks stands for it (in bytes, the one that receives least).  With one number of ranks
scaling and bytes are bars.  A figure for which the file holds nothing is left out, with a line on
stderr.  Exit code 2: bad input, or nothing could be drawn.
"""

from a2d_mpi.experiments.options import Parser, path, run_serial, whole
from a2d_mpi.figures.plots import FIGURES, OTHERS, PHASES, plot


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("plot.py", __doc__)
    add = parser.add_argument
    add("results", type=path, help="file of a driver, or of --trace, or a folder")
    add("--output", type=path, default="results/figures", help="folder (default %(default)s)")
    add("--what", default=",".join(FIGURES), help=f"default %(default)s; or {', '.join(OTHERS)}")
    add("--workload", help="its name in the file; default: that of the most rank counts and runs")
    add("--ranks", type=whole(1), help="of phases and timeline; default: the most")
    add("--phase", choices=PHASES, default="both", help="to plot (default %(default)s)")
    add("--run", help="of the timeline, its name; default: the fastest Attention2D")
    add("--format", default="png,svg", help="default %(default)s")
    return parser


if __name__ == "__main__":
    run_serial(build_parser, plot)
