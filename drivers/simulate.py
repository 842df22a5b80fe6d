r"""Replay plans x ranks x lengths x networks by SimGrid, beside the model's prediction.

    python drivers/simulate.py --output results/scale.h5 --profile data/machines/a100-16x4.toml \
        --networks switch --ranks 4 --seqlens 4K --plans ring,attention2d
    python drivers/simulate.py --output results/scale.h5 --profile data/machines/a100-16x4.toml \
        --networks "switch,fat tree:2,dragonfly" --ranks 64,256,1024 --seqlens 1M \
        --nheads-kv 32,8 --backward --plans "ring,auto:each" --resume

Every rank does what the model has it do, for as long.  Only the network is another: SimGrid shares
its links among all messages.  A network is "switch", "fat tree", "fat tree:4" (four times
oversubscribed) or "dragonfly".
Every simulation is added to the file when it is done.  --resume continues where an earlier run
ended, and tries again what ran out of time, if there is more time now.
All-gathers of many ranks take long: for each message that ends, SimGrid shares the links anew
among all others.  With --coarse 1e-3, messages that end close after each other end together.

It needs SimGrid and a compiler: apt-get install g++ libsimgrid-dev (Debian, Ubuntu).  Python needs
nothing of it.

Exit code 0: done.  2: bad input, or no SimGrid.
"""

from a2d_mpi.experiments.options import (
    PLANS_HELP,
    Parser,
    add_options,
    add_workloads,
    listed,
    path,
    real,
    run_serial,
    whole,
)
from a2d_mpi.experiments.simulate import RANKS, simulate_all


def build_parser() -> Parser:
    """Build the parser of this driver's options."""
    parser = Parser("simulate.py", __doc__, epilog=PLANS_HELP)
    group = parser.add_argument_group("machines")
    add = group.add_argument
    text = "TOML files of machines, see data/machines"
    add_options(group, "profile", type=listed(path), metavar="FILE,...", required=True, help=text)
    text = "numbers of ranks: 64,256"
    add("--ranks", type=listed(whole(1, RANKS)), metavar="N,...", default="64", help=text)
    text = "networks, see above: switch,fat tree:4"
    add("--networks", type=listed(str), metavar="NETWORK,...", default="switch", help=text)
    for name, kind, text in (
        ("slow-rank", real(1, 1e6), "the first rank takes X times as long"),
        ("latency", real(0, 1e6), "latencies are X times as long"),
        ("slow-port", real(1, 1e6), "the first node's first NIC has 1 / X of its bandwidth"),
    ):
        add(f"--{name}", type=kind, metavar="X", default=1.0, help=text)
    text = "ranks compute, copy and merge in no time"
    add("--links-alone", action="store_true", help=text)
    add_options(add_workloads(parser), "masks")
    parser.set_defaults(seqlens="1M", nheads="32", headdim="128", dtypes="bfloat16")
    group = parser.add_argument_group("plans and simulation")
    add = group.add_argument
    add_options(group, "plans", default="auto:each")
    text = "messages end together within this share of the predicted time"
    add("--coarse", type=real(0, 1), metavar="X", default=0.0, help=text)
    text = "seconds after which a phase is given up"
    add("--timeout", type=real(1e-3, 1e9), metavar="S", default=3600.0, help=text)
    group = parser.add_argument_group("output")
    add_options(group, "output", required=True)
    add_options(group, "resume")
    return parser


if __name__ == "__main__":
    run_serial(build_parser, simulate_all)
