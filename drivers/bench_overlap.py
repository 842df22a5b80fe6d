"""How much of the communication the overlap hides, and by which means.

    bash jobs/emulate.sh 2 1 200mbit -- python drivers/bench_overlap.py --seqlen 4096

On every grid of one row or one column: the seconds of the kernels and merges alone (of the runs
without overlap: no message is under way then), of the transfers (bytes over the rate that the
phases without overlap reach), and of the whole with and without overlap, by who calls MPI while
the kernels run (`a2d_mpi.comm.transport.PROGRESS`).  Medians over the trials of the slowest rank;
the variants take turns.  "hidden": the share of the shorter one of compute and transfer that ran
beside the other.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from a2d_mpi import Attention2D, ProcessGrid
from a2d_mpi.comm.transport import PROGRESS
from a2d_mpi.core.masks import MASKS
from a2d_mpi.experiments.cli import Parser, arguments, run
from a2d_mpi.experiments.options import TRIALS, whole


def build_parser(comm: MPI.Intracomm | None = None) -> Parser:
    """The options of this driver."""
    parser = Parser(prog="bench_overlap.py", description=__doc__.split("\n\n")[0], comm=comm)
    add = parser.add_argument
    add("--seqlen", type=whole(1), default=4096)
    add("--nheads", type=whole(1), default=8)
    add("--headdim", type=whole(1), default=64)
    add("--mask", choices=MASKS, default="causal")
    add("--trials", type=TRIALS, default=5)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    comm = MPI.COMM_WORLD
    args = arguments(comm, build_parser, argv)
    if comm.rank == 0:
        print("grid  pass      compute transfer |    off" + "".join(f"{x:>8}" for x in PROGRESS)
              + "   best/compute  hidden")  # fmt: skip
    for rows in dict.fromkeys((1, comm.size)):
        grid = ProcessGrid(comm, rows, comm.size // rows)
        with threadpool_limits(1):
            seconds, compute = measure(grid, args)
        for phase in ("forward", "backward"):
            variants = {name: np.median(x) for name, x in seconds[phase].items()}
            busy, off = np.median(compute[phase]), variants.pop("off")
            best = min(variants.values())
            transfer = off - busy
            hidden = (off - best) / max(min(busy, transfer), 1e-9)
            if comm.rank == 0:
                print(
                    f"{grid.rows}x{grid.cols:<3} {phase:<9}{busy:8.3f}{transfer:9.3f} |{off:7.3f}"
                    + "".join(f"{x:8.3f}" for x in variants.values())
                    + f"{best / busy:15.2f}{hidden:8.0%}",
                    flush=True,
                )
        grid.free()
    return 0


def measure(grid: ProcessGrid, args):
    """Seconds of every trial by phase and variant, and of compute and merge, by phase."""
    comm = grid.comm
    plans = {
        name: Attention2D(
            grid,
            MASKS[args.mask](),
            seqlen=args.seqlen,
            nheads=args.nheads,
            headdim=args.headdim,
            overlap=False if name == "off" else name,
            threads=1,
        )
        for name in ("off", *PROGRESS)
    }
    rng = np.random.default_rng(comm.rank)
    shape = (len(plans["off"].tokens), args.nheads, args.headdim)
    q, k, v, dout = (rng.standard_normal(shape, np.float32) for _ in range(4))
    phases = ("forward", "backward")
    seconds = {phase: {name: [] for name in plans} for phase in phases}
    compute = {phase: [] for phase in phases}
    for trial in range(args.trials + 1):  # the first warms up
        for name, plan in plans.items():
            for phase in phases:
                comm.Barrier()
                start = time.perf_counter()
                if phase == "forward":
                    out, lse = plan.forward(q, k, v)
                else:
                    plan.backward(dout, q, k, v, out, lse)
                mine = time.perf_counter() - start
                busy = sum(plan.timings[f"{phase}/{part}"] for part in ("compute", "merge"))
                slowest, busiest = comm.allreduce(mine, MPI.MAX), comm.allreduce(busy, MPI.MAX)
                if trial:
                    seconds[phase][name].append(slowest)
                    if name == "off":
                        compute[phase].append(busiest)
    for plan in plans.values():
        plan.free()
    return seconds, compute


if __name__ == "__main__":
    run(MPI.COMM_WORLD, "bench_overlap.py", main)
