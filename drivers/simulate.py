"""Plans x ranks x lengths x networks replayed by SimGrid, beside the model's prediction.

    python drivers/simulate.py --output results/scale.h5 --profile data/machines/a100-16x4.toml \
        --networks "switch,fat tree:2,dragonfly" --ranks 64,256,1024 --seqlens 1M --nheads 32 \
        --nheads-kv 32,8 --masks causal --backward --plans "ring,auto:each" --resume

Every rank does what the model has it do, for as long; only the network is another: SimGrid shares
its links among all messages.  Plans are those of drivers/bench.py; a network is "switch", "fat
tree", "fat tree:4" (four times oversubscribed) or "dragonfly".
Every simulation is added to the file when it is done; --resume goes on where an earlier run ended,
and tries again what ran out of time, if there is more now.  All-gathers of many ranks take long:
for each message that ends, SimGrid shares the links anew among all others.  With --coarse 1e-3
those end together that end close after each other.

It needs SimGrid and a compiler: apt-get install g++ libsimgrid-dev (Debian, Ubuntu).  Python needs
nothing of it.

Exit code 2: bad input, or no SimGrid.
"""

from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.core.wire import FORMATS
from a2d_mpi.experiments.options import (
    HEADDIM,
    HEADDIM_V_HELP,
    HEADS,
    MASK_HELP,
    WIRE_HELP,
    Parser,
    listed,
    masks,
    one_of,
    path,
    real,
    run_serial,
    tokens,
    whole,
)
from a2d_mpi.experiments.simulate import RANKS, simulate_all


def build_parser() -> Parser:
    """The options of this driver."""
    parser = Parser("simulate.py", __doc__)
    add = parser.add_argument
    add("--output", type=path, required=True, help="HDF5 file")
    add("--resume", action="store_true", help="add to the file what is not there yet")
    add("--profile", type=path, nargs="+", required=True, help="TOML files, see data/machines")
    add("--networks", default="switch", help="default %(default)s")
    add("--ranks", type=listed(whole(1, RANKS)), default=[64], help="64,256: default 64")
    add("--plans", default="auto:each", help="as of drivers/bench.py (default %(default)s)")
    add("--seqlens", type=listed(tokens), default="1M", help="64K,1M (default %(default)s)")
    add("--masks", type=masks, default="causal", help=f"{MASK_HELP} (default %(default)s)")
    add("--nheads", type=listed(HEADS), default="32", help="query heads (default %(default)s)")
    add("--nheads-kv", type=listed(HEADS), help="32,8; default: as many as query heads")
    add("--headdim", type=listed(HEADDIM), default="128", help="default %(default)s")
    add("--headdim-v", type=HEADDIM, help=HEADDIM_V_HELP)
    add("--dtypes", type=listed(one_of(DTYPES)), default="bfloat16", help="default %(default)s")
    text = f"none (as they are), or {WIRE_HELP} (default %(default)s)"
    add("--wire", type=listed(one_of(["none", *FORMATS])), default="none", help=text)
    add("--backward", action="store_true", help="also the gradients")
    for name, kind, what in (
        ("slow-rank", real(1, 1e6), "what the first rank does takes so many times as long"),
        ("latency", real(0, 1e6), "latencies are so many times as long"),
        ("slow-port", real(1, 1e6), "the first node's first NIC has so many times less bandwidth"),
    ):
        add(f"--{name}", type=kind, default=1.0, help=f"{what} (default %(default)s)")
    add("--links-alone", action="store_true", help="ranks compute, copy and merge in no time")
    coarse = "share of the predicted time within which messages end at once (default: none)"
    add("--coarse", type=real(0, 1), default=0.0, help=coarse)
    add(
        "--timeout",
        type=real(1e-3, 1e9),
        default=3600.0,
        help="s of a phase (default %(default)s)",
    )
    return parser


if __name__ == "__main__":
    run_serial(build_parser, simulate_all)
