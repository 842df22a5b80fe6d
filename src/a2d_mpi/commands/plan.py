r"""Plans for a machine: the fastest methods and grids, also on other networks.

    python -m a2d_mpi plan --profile data/machines/h100-64x1.toml --ranks 64 --seqlen 1M \
        --nheads 96 --headdim 128 --mask causal --backward
    python -m a2d_mpi plan simulate --output results/scale.h5 --ranks 4 --seqlens 4K \
        --profile data/machines/a100-16x4.toml --networks switch --plans ring,attention2d

Nothing is run, and no MPI is needed.

Exit code 0: done.  2: bad input, or no plan fits.
"""

from collections.abc import Callable

from a2d_mpi.experiments import plan
from a2d_mpi.experiments.options import Parser, add_options, listed, path, whole
from a2d_mpi.experiments.sweep import PLANNED, add_plans, add_workloads


def rank(parser: Parser) -> Callable:
    r"""List methods and grids for a problem on a machine, the fastest first.

        python -m a2d_mpi plan --profile data/machines/h100-64x1.toml --ranks 64 --seqlen 1M \
            --nheads 96 --headdim 128 --mask causal --backward
        python -m a2d_mpi plan --profile data/machines/h100-8.toml --ranks 8 --seqlen 128K \
            --model FOLDER

    --model FILE takes heads, layers, windows and dtype from the config.json of a model of
    transformers, in place of --nheads, --nheads-kv, --headdim and --headdim-v, and needs PyTorch
    and transformers: pip install -e '.[torch]'.  Seconds and bytes
    are then of the attention in all layers, which have one grid.  --mask is what layers without a
    window see; layers with a window see what is also inside the window.  --dtype replaces the
    dtype of the file.

    The table has a line for each plan:

      method, grid   rows x cols x ranks that share the heads
      order          the axes from nodes to ranks; "ucr": neighbouring ranks differ in r
      total, ...     seconds in all, and by part
      received       bytes that a rank receives
      by a node      bytes that a node gets from other nodes
      x bound        bytes over all ranks, as a multiple of the least that exact attention needs
                     without a head axis
      memory         of a rank
      the end        what the plan loses against the first plan
    """
    plan.add_problem(parser, PLANNED, needs_heads=False)
    text = "config.json of a model of transformers, or a folder that has one; see above"
    parser.add_argument("--model", type=path, metavar="FILE", help=text)
    add = parser.add_argument_group("plans and table").add_argument
    text = "best: simulate plans until the fastest is certain; all: simulate every plan"
    add("--simulate", choices=("best", "all"), default="best", help=text)
    add("--top", type=whole(0), metavar="N", default=20, help="number of plans to print; 0: all")
    return plan.rank


def simulate(parser: Parser) -> Callable:
    r"""Simulate plans x ranks x lengths x networks, beside the same plans on one switch.

        python -m a2d_mpi plan simulate --output results/scale.h5 --ranks 4 --seqlens 4K \
            --profile data/machines/a100-16x4.toml --networks switch --plans ring,attention2d
        python -m a2d_mpi plan simulate --output results/scale.h5 --ranks 64,256,1024 \
            --profile data/machines/a100-16x4.toml --networks "switch,fat tree:2,dragonfly" \
            --seqlens 1M --nheads-kv 32,8 --backward --plans "ring,auto:each" --resume

    A network is "switch", "fat tree", "fat tree:4" (four times oversubscribed) or "dragonfly".
    Every simulation is added to the file when it is done.  --resume continues where an earlier run
    ended.
    """
    group = parser.add_argument_group("machines")
    add = group.add_argument
    text = "TOML files of machines, see data/machines"
    add_options(group, "profile", type=listed(path), metavar="FILE,...", required=True, help=text)
    text = "numbers of ranks: 64,256"
    add("--ranks", type=listed(whole(1, plan.RANKS)), metavar="N,...", default="64", help=text)
    text = "networks, see above: switch,fat tree:4"
    add("--networks", type=listed(str), metavar="NETWORK,...", default="switch", help=text)
    text = "ranks compute, copy and merge in no time"
    add("--links-alone", action="store_true", help=text)
    add_workloads(parser)
    parser.set_defaults(seqlens="1M", nheads="32", headdim="128", dtypes="bfloat16")
    group = parser.add_argument_group("plans")
    add_plans(parser, group, default="auto:each")
    group = parser.add_argument_group("output")
    add_options(group, "output", required=True)
    add_options(group, "resume")
    return plan.simulate_all


COMMANDS, DEFAULT = (rank, simulate), "rank"
