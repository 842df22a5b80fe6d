r"""Benchmarks of a GPT: training steps, decoding steps and linear attention.

    mpiexec -n 4 python drivers/bench_gpt.py train --output results/step.h5 \
        --preset gpt3-175b-layer --width 192 --nheads 12 --positions rotary --seqlen 2K \
        --plans attention2d:2x2,ring
    mpiexec -n 4 python drivers/bench_gpt.py decode --output results/decode.h5
    mpiexec -n 4 python drivers/bench_gpt.py linear --output results/linear.h5

Exit code 0: all checks passed.  1: a check failed.  2: bad input, or the output cannot be written.
"""

import argparse

from mpi4py import MPI

from a2d_mpi.experiments.bench_decode import bench_decode
from a2d_mpi.experiments.bench_linear import LINEAR, bench_linear
from a2d_mpi.experiments.bench_train import bench_train
from a2d_mpi.experiments.cli import Parser, run
from a2d_mpi.experiments.model_options import FLOATS, add_model, add_sizes
from a2d_mpi.experiments.options import (
    BLOCK,
    PLANS_HELP,
    add_old_name,
    add_options,
    add_trace,
    listed,
    one_of,
    pair,
    real,
    tokens,
    whole,
)
from a2d_mpi.linear.features import FEATURE_MAPS
from a2d_mpi.linear.norms import NORMS
from a2d_mpi.linear.plan import CHUNK
from a2d_mpi.schedules import METHODS


def train(parser: Parser) -> None:
    r"""Compare training steps by different plans: seconds by part, bytes, memory.

        mpiexec -n 4 python drivers/bench_gpt.py train --output results/step.h5 \
            --preset gpt3-175b-layer --width 192 --nheads 12 --positions rotary --seqlen 2K \
            --plans attention2d:2x2,ring

    Weights and tokens are random.  The loss and the gradients of every plan are compared with a
    model in float64 on one rank, whose attention is a textbook's.  The learning rate is 0, which
    keeps the weights, so every step must repeat the first step bit for bit.
    The largest memory of a step's activations is counted once, in a step that is not timed.  With
    --recompute both ways are run.  --resume adds to a file, also with other numbers of ranks.
    """
    parser.epilog = PLANS_HELP
    group = add_model(parser)
    text = "number of different tokens"
    group.add_argument("--vocab", type=whole(2, 1 << 24), metavar="N", default=256, help=text)
    group = parser.add_argument_group("workload and plans")
    add_options(group, "seqlen", default="1K")
    add_options(group, "mask")
    add_options(group, "dtype", choices=FLOATS)
    add_options(group, "plans", default="attention2d,ring")
    add_options(group, "profile")
    _add_measurement(parser, output_needed=True)


def decode(parser: Parser) -> None:
    """Measure decoding steps by length of context and number of ranks.

        mpiexec -n 4 python drivers/bench_gpt.py decode --output results/decode.h5

    The table has seconds, bytes and messages.  The caches of all ranks are filled with random keys
    and values, so there is no prompt to compute.  Attention of one request is compared with
    float64, and all bytes and messages with the prediction.
    """
    add_sizes(parser, layers=2, width=512, nheads=8, nheads_kv=2, headdim="width / nheads")
    group = parser.add_argument_group("requests and ranks")
    text = "lengths of the context: 4096,64K"
    group.add_argument("--contexts", type=listed(tokens()), metavar="TOKENS,...",
                       default="1K,4K,16K,64K", help=text)  # fmt: skip
    text = "requests per step"
    group.add_argument("--requests", type=whole(1, 1 << 16), metavar="N", default=4, help=text)
    text = "numbers of ranks; default: 1, 2, 4, ... times --head-ranks"
    group.add_argument("--ranks", type=listed(whole(1)), metavar="N,...", help=text)
    text = "also run with separate attention ranks and FFN ranks, see docs/models.md: 2+2,3+1"
    kind = listed(pair("+", "ATTENTION+FFN ranks"))
    group.add_argument("--apart", type=kind, metavar="A+F,...", help=text)
    text = "micro-batches of a step, with --apart"
    group.add_argument("--micro-batches", type=whole(1), metavar="N", default=3, help=text)
    add_options(group, "head-ranks", "kv-block")
    add_old_name(group, "--heads", "--head-ranks", whole(1), "head_ranks")
    add_old_name(group, "--block", "--kv-block", BLOCK, "kv_block")
    add_trace(_add_measurement(parser), "the last step of each run")


def linear(parser: Parser) -> None:
    """Compare linear attention (LASP-2, LASP) with exact attention, by length.

        mpiexec -n 4 python drivers/bench_gpt.py linear --output results/linear.h5

    Sampled rows of all results are compared with dense attention of either kind in float64, and
    all bytes with the formula.
    """
    group = parser.add_argument_group("workloads and plans")
    plans = (*LINEAR, *METHODS)
    text = f"plans, from {', '.join(plans)}"
    group.add_argument("--plans", type=listed(one_of(plans)), metavar="PLAN,...",
                       default="lasp2,lasp,attention2d", help=text)  # fmt: skip
    add_options(group, "seqlens", default="1K,2K,4K")
    add_options(group, "mask", choices=("causal", "full"), metavar=None, help="causal or full")
    add_options(group, "nheads", default=8)
    add_options(group, "headdim", default=64)
    add_options(group, "dtype", choices=FLOATS)
    add = parser.add_argument_group("linear attention").add_argument
    add(
        "--feature-map",
        choices=FEATURE_MAPS,
        default="elu+1",
        help="feature map of queries and keys",
    )
    add("--norm", choices=NORMS, default="output", help="normalisation of the results")
    add("--decay", type=real(0, 1), metavar="X", help="decay of all heads; default: none")
    add(
        "--distribution",
        metavar="NAME",
        default="contiguous",
        help="distribution of tokens over ranks",
    )
    text = "tokens that are computed at once"
    add("--chunk", type=tokens(most=4096), metavar="TOKENS", default=CHUNK, help=text)
    _add_measurement(parser)


def _add_measurement(parser: Parser, output_needed: bool = False) -> argparse._ArgumentGroup:
    """Add the options that all subcommands have; return the last group."""
    group = parser.add_argument_group("measurement")
    add_options(group, "trials", "seed", "threads")
    group = parser.add_argument_group("output")
    add_options(group, "output", required=output_needed)
    if output_needed:
        add_options(group, "resume")
    return group


JOBS = {"train": bench_train, "decode": bench_decode, "linear": bench_linear}


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("bench_gpt.py", __doc__, comm)
    parser.add_commands(train, decode, linear)
    return parser


if __name__ == "__main__":
    run(MPI.COMM_WORLD, build_parser, lambda comm, args: JOBS[args.command](comm, args))
