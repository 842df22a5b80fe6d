"""Measure transfers that computing does not hide although it takes 1.5 times as long.

    EMULATE_CORES=1 bash jobs/emulate.sh 2 1 200mbit -- \
        python tests/tools/exposed.py 200e6 5 [SLICES]

On all ranks of an emulated cluster whose links have the given bits per second.  For each plan and
phase the sequence has the length at which the kernels take 1.5 times what the busiest rank's bytes
take.  Exposed: seconds in MPI waits over seconds of the transfers, median of so many trials.  A
fast rank also waits for a slow one; so the line ends with the seconds by which the phase takes
longer than the busiest rank's work, over seconds of the transfers.
SLICES: slices of the heads; by default each plan chooses them.
"""

import sys

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, Full, ProcessGrid, RingAttention

RATIO, FIRST, HEADS, WIDTH = 1.5, 2048, 8, 64
SIZES = {"nheads": HEADS, "headdim": WIDTH}


def call(plan, trials: int) -> dict[str, tuple[float, float, float, float, float]]:
    """Return seconds of computing, bytes, and seconds of waits, of all work and in all."""
    comm, rng = plan.grid.comm, np.random.default_rng(0)
    n = len(plan.tokens)
    q, k, v, dout = (rng.standard_normal((n, HEADS, WIDTH), np.float32) for _ in range(4))
    found = {"forward": [], "backward": []}
    for trial in range(trials + 1):
        before = {key: list(x) for key, x in plan.traffic.bytes.items()}
        comm.Barrier()
        out, lse = plan.forward(q, k, v)
        comm.Barrier()
        plan.backward(dout, q, k, v, out, lse)
        for phase, rows in found.items():
            sent = [
                np.subtract(x, before.get(key, [0, 0]))
                for key, x in plan.traffic.bytes.items()
                if key[0] == phase
            ]
            parts = (
                plan.timings[f"{phase}/compute"],
                float(np.sum(sent, axis=0).max()) if sent else 0.0,
                plan.timings[f"{phase}/wait"],
                plan.timings[f"{phase}/compute"] + plan.timings[f"{phase}/merge"],
                plan.timings[f"{phase}/total"],
            )
            if trial:  # the first one warms up
                rows.append(comm.allreduce(np.array(parts), lambda a, b: np.maximum(a, b)))
    return {phase: np.median(rows, axis=0) for phase, rows in found.items()}


def main(rate: float, trials: int = 5, slices: int | None = None) -> None:
    """Print a table, and the medians of its last column by method."""
    comm = MPI.COMM_WORLD
    shapes = [
        (rows, comm.size // rows) for rows in range(1, comm.size + 1) if comm.size % rows == 0
    ]
    plans = [(Attention2D, *shape) for shape in shapes] + [(RingAttention, comm.size, 1)]
    exposed: dict[type, list[float]] = {}
    for method, rows, cols in plans:
        grid = ProcessGrid(comm, rows, cols)
        for mask in (Full(), Causal()):

            def measured(seqlen, grid=grid, method=method, mask=mask):
                plan = method(grid, mask, seqlen=seqlen, slices=slices, **SIZES)
                found = call(plan, trials)
                plan.free()
                return found

            first = measured(FIRST)
            for phase, found in first.items():
                seqlen = FIRST
                for _ in range(2):  # kernels are faster with more tokens
                    compute, nbytes, *_ = found
                    longer = RATIO * (8 * nbytes / rate) / compute
                    seqlen = max(64, 64 * round(seqlen * longer / 64))
                    found = measured(seqlen)[phase]
                compute, nbytes, wait, work, total = found
                transfer = 8 * nbytes / rate
                exposed.setdefault(method, []).append(wait / transfer)
                if comm.rank == 0:
                    name = f"{method.__name__} {rows}x{cols} {type(mask).__name__} {phase}"
                    seconds = f"computing {1e3 * compute:.0f} ms, transfers {1e3 * transfer:.0f}"
                    ratios = f"ratio {compute / transfer:.2f}, exposed {wait / transfer:.1%}"
                    beyond = f"beyond the work {(total - work) / transfer:.1%}"
                    print(f"{name}: {seqlen} tokens, {seconds} ms, {ratios}, {beyond}", flush=True)
        grid.free()
    if comm.rank == 0:
        for method, shares in exposed.items():
            print(f"{method.__name__}: median {np.median(shares):.1%}")


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
