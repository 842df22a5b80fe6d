r"""Benchmarks: attention, kernels, linear attention; training and decoding of a model.

    mpiexec -n 4 python -m a2d_mpi bench --output results/bench.h5 --seqlens 512 --plans all
    python -m a2d_mpi bench kernels --shapes 512x2x64 --trials 3
    mpiexec -n 4 python -m a2d_mpi bench decode llama-tiny --output results/decode.h5

All results are checked, also those of an earlier run.

Exit code 0: all checks passed.  1: a check failed.  2: bad input, or the output cannot be written.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

from a2d_mpi.experiments.cli import run_torch
from a2d_mpi.experiments.options import (
    Parser,
    add_engine,
    add_options,
    check_text,
    listed,
    one_of,
    tokens,
    whole,
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


def train(parser: Parser) -> Callable:
    r"""Compare training steps of a model of transformers by different plans: seconds by part.

        mpiexec -n 4 python -m a2d_mpi bench train llama-tiny --output results/step.h5 \
            --seqlens 1K,4K --plans attention2d:2x2,ring --resume

    MODEL is as of train, and tokens are random.  All plans of a length are timed in
    turn, trial by trial.  Before that, the loss and the gradients of each plan are compared with
    one process in float64.  The learning rate is 0, so every step must repeat the first loss.
    "auto" plans causal attention with the heads of the first layer.
    """
    group = _add_model(parser, ("float32", "float64", "bfloat16"))
    add_list(group, "seqlens", "seqlen", default="1K")
    add_plans(parser, group, default="attention2d,ring")
    add_options(group, "profile", "checkpoint-layers")
    add_engine(parser)
    return partial(run_torch, "bench_steps.bench_train")


def decode(parser: Parser) -> Callable:
    """Measure the tokens that a model of transformers decodes, by context and number of ranks.

        mpiexec -n 4 python -m a2d_mpi bench decode llama-tiny --output results/decode.h5

    MODEL is as of train.  Plans compute random prompts, and each rank keeps the keys of
    its own tokens.  The logits of all decoded tokens are compared with one process in float64, and
    all bytes with a formula.  The table has the seconds of a step, which decodes a token of each
    request, also by one process.
    """
    group = _add_model(parser, ("float32", "float64"))
    text = "lengths of the prompts: 4096,64K"
    group.add_argument("--contexts", type=listed(tokens()), metavar="TOKENS,...",
                       default="1K,4K,16K", help=text)  # fmt: skip
    text = "requests per step"
    group.add_argument("--requests", type=whole(1, 1 << 16), metavar="N", default=1, help=text)
    text = "numbers of ranks; default: 1, 2, 4, ..."
    group.add_argument("--ranks", type=listed(whole(1)), metavar="N,...", help=text)
    add_options(group, "threads")
    return partial(run_torch, "bench_steps.bench_decode")


def _add_model(parser: Parser, dtypes: Sequence[str]) -> argparse._ArgumentGroup:
    """Add the options that both have; return the group of the model."""
    from a2d_mpi.experiments.models import NAMES, model_name

    group = parser.add_argument_group("model and workload")
    text = f"{', '.join(NAMES)}, or a folder of transformers"
    group.add_argument("model", type=model_name, metavar="MODEL", help=text)
    add_options(group, "dtype", choices=dtypes)
    others = parser.add_argument_group("measurement and output")
    add_options(others, "trials", "seed", "resume")
    add_options(others, "output", required=True)
    return group


def linear(parser: Parser) -> Callable:
    """Compare causal linear attention (LASP-2, LASP) with exact attention, by length.

        mpiexec -n 4 python -m a2d_mpi bench linear --output results/linear.h5

    Sampled rows of all results are compared with dense attention of either kind in float64, and
    all bytes with the formula.
    """
    from a2d_mpi.experiments.bench_linear import LINEAR, bench_linear
    from a2d_mpi.schedules.method import METHODS

    group = parser.add_argument_group("workloads and plans")
    plans = (*LINEAR, *METHODS)
    text = f"plans, from {', '.join(plans)}"
    group.add_argument("--plans", type=listed(one_of(plans)), metavar="PLAN,...",
                       default="lasp2,lasp,attention2d", help=text)  # fmt: skip
    add_list(group, "seqlens", "seqlen", default="1K,2K,4K")
    add_options(group, "nheads", default=8)
    add_options(group, "headdim", default=64)
    add_options(group, "dtype", choices=("float32", "float64"))
    group = parser.add_argument_group("measurement and output")
    add_options(group, "trials", "seed", "threads", "output")
    return bench_linear


COMMANDS, DEFAULT = (attention, kernels, train, decode, linear), "attention"
