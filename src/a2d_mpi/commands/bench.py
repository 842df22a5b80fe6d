r"""Benchmarks: attention, and kernels.

    mpiexec -n 4 python -m a2d_mpi bench --output results/bench.h5 --seqlens 512 --plans all
    python -m a2d_mpi bench kernels --shapes 512x2x64 --trials 3

All results are checked, also those of an earlier run.

Exit code 0: all checks passed.  1: a check failed.  2: bad input, or the output cannot be written.
"""

from collections.abc import Callable

from a2d_mpi.experiments.options import (
    Parser,
    add_engine,
    add_options,
    check_text,
    listed,
    one_of,
)
from a2d_mpi.experiments.sweep import add_list, add_plans, add_workloads


def attention(parser: Parser) -> Callable:
    r"""Compare plans x workloads, checked, timed in turn, in one HDF5 file.

        mpiexec -n 4 python -m a2d_mpi bench --output results/bench.h5 --seqlens 512 --plans all
        mpiexec -n 4 python -m a2d_mpi bench --output results/bench.h5 --plans auto,ring \
            --seqlens 2048,4K --masks full,causal --nheads-kv 8,1 --backward \
            --profile results/here.toml --resume

    Every combination of the lists is run.  All plans of a workload (mask, sizes, dtype) are made
    and checked first.  Then they are timed trial by trial in turn, so that they meet the same
    machine.  When a workload is done, a new file with its results takes the place of the old file.
    A job that is killed leaves a whole file and loses only the workload in progress.  --resume
    runs what is not there yet.  Other numbers of ranks may add to the same file.
    """
    from a2d_mpi.experiments.bench import bench

    add_workloads(parser)
    group = parser.add_argument_group("plans")
    add_plans(parser, group, default="all")
    for name, value, text in (
        ("--overlap", True, "communicate while computing (default)"),
        ("--no-overlap", False, "communicate and compute in turn; with --overlap: run both"),
    ):
        group.add_argument(name, dest="overlaps", action="append_const", const=value, help=text)
    add_options(group, "profile")
    group = parser.add_argument_group("measurement and checks")
    add_options(group, "trials")
    add_options(group, "warmup", help="runs before the timed runs; at least one is made")
    add_options(group, "check", type=check_text())
    add_options(group, "seed")
    group = parser.add_argument_group("output")
    add_options(group, "output", required=True)
    add_options(group, "resume")
    add_engine(parser)
    return bench


def kernels(parser: Parser) -> Callable:
    """Compare kernels with PyTorch's scaled_dot_product_attention, in one process.

        python -m a2d_mpi bench kernels --shapes 512x2x64 --trials 3
        python -m a2d_mpi bench kernels --trials 9 --output data/results/tiles.h5
        python -m a2d_mpi bench kernels --shapes 16384x8x64 --masks full,sliding_window
        python -m a2d_mpi bench kernels --device gpu --masks full,sliding_window_causal:4096
        OPENBLAS_CORETYPE=Haswell python -m a2d_mpi bench kernels  # as if the CPU were another

    To compare with PyTorch: pip install -e '.[bench]'; on CPUs its build for CPUs is enough.

    All kernels run in turn, trial by trial.  On a CPU these are "numpy" and the fastest kernel for
    the dtype, on one core.  On a GPU it is the fastest kernel that is installed.  For the masks
    that torch has, its attention runs too, by the backend that torch chooses or by those of
    --torch.  The backward pass is timed against torch's autograd.

    The table has FLOP/s in the median over the trials: 4 operations per pair, head and element
    forward, and 10 backward.  Masked pairs are not counted.  It also has the ratios to torch.
    --output adds the seconds of all trials to a benchmark file, with versions, the CPU or GPU,
    BLAS, and the CPU that BLAS takes this CPU for.  "plot results FILE --what kernels" draws
    the file.
    """
    from a2d_mpi.experiments.bench_kernel import BACKENDS, MASKS, bench_kernel, shape

    group = parser.add_argument_group("workloads and kernels")
    add = group.add_argument
    add("--device", choices=("cpu", "gpu"), default="cpu", help="where the kernels run")
    text = "SEQLENxNHEADSxHEADDIM; default: 4096x4x128,8192x2x64 or, on a GPU, 16384x16x128"
    add("--shapes", type=listed(shape), metavar="SHAPE,...", help=text)
    add_options(group, "nheads-kv", help="KV heads of all shapes; default: as many as query heads")
    add_list(group, "masks", "mask", default=",".join(MASKS))
    text = "storage dtype; default: float32 or, on a GPU, bfloat16"
    add_options(group, "dtype", default=None, help=text)
    text = "names in a2d_mpi.kernels.KERNELS; default: numpy,auto or, on a GPU, auto"
    add("--kernels", type=listed(str), metavar="KERNEL,...", help=text)
    text = f"backends of torch's attention: {', '.join(BACKENDS)}"
    options = {"type": listed(one_of(BACKENDS)), "metavar": "BACKEND,...", "help": text}
    add("--torch", default=["default"], **options)
    group = parser.add_argument_group("measurement and output")
    add_options(group, "trials")
    add_options(group, "output", help="HDF5 file to which the seconds are added")
    text = "name of the results in the file; default: CPU or GPU, and BLAS"
    group.add_argument("--name", metavar="TEXT", help=text)
    return bench_kernel


COMMANDS, DEFAULT = (attention, kernels), "attention"
