"""What of the transfers of ranks that share a GPU is hidden, and what a call costs its host.

    mpiexec -n 4 python tests/gpu/gpu_overlap.py                 # 16K tokens, 16 heads of 128
    mpiexec -n 4 python tests/gpu/gpu_overlap.py 16384 16 128

Two plans on one square grid make the same calls, one with overlap and one in turn.  Hidden is the
share of the wait in turn that the overlap saves.  A wait is the time in which the GPU neither
computes nor merges for a rank.  Host is the time until a call returns, without its waits for
messages: the GPU may still compute then.  Times are of the slowest rank, medians of ten trials.
Launches and messages are of rank 0.
"""

import sys
import time
from collections import Counter
from functools import wraps

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, Full, ProcessGrid
from a2d_mpi.comm.gpus import bind_gpu
from a2d_mpi.core.dtypes import DTYPES
from a2d_mpi.experiments.grids import grid_shape
from a2d_mpi.experiments.measure import turns

TRIALS = 10
COLUMNS = ("total", "wait", "host")  # milliseconds


def main(comm: MPI.Intracomm, seqlen: int = 16384, nheads: int = 16, headdim: int = 128) -> None:
    """Print a line for each mask and phase."""
    device, sharing = bind_gpu(comm)
    counted = counter()
    grid = ProcessGrid(comm, *grid_shape(comm.size))
    if comm.rank == 0:
        print(f"{device.description}, {comm.size} ranks, {sharing} on a GPU, ms", flush=True)
    for mask in (Full(), Causal()):
        sizes = {"seqlen": seqlen, "nheads": nheads, "headdim": headdim, "dtype": "bfloat16"}
        plans = {x: Attention2D(grid, mask, overlap=x, **sizes) for x in (True, False)}
        rng, n = np.random.default_rng(comm.rank), len(plans[True].tokens)
        q, k, v, dout = (
            device.upload(rng.standard_normal((n, nheads, headdim)).astype(DTYPES["bfloat16"]))
            for _ in range(4)
        )
        found: dict[tuple, list] = {}
        for i, overlap in enumerate(turns(list(plans), TRIALS + 2)):
            plan, given = plans[overlap], (q, k, v)
            for phase in ("forward", "backward"):
                device.seconds(device.mark(), device.mark())  # nothing is queued
                comm.Barrier()
                counted.clear()
                start = time.perf_counter()
                results = getattr(plan, phase)(*given)
                host = time.perf_counter() - start
                host -= sum(end - begin for begin, end in plan._engine.waits[phase])
                given = (dout, q, k, v, *results)
                row = [plan.timings[f"{phase}/total"], plan.timings[f"{phase}/wait"], host]
                row = comm.allreduce(1e3 * np.array(row), np.maximum)
                if i >= 2 * len(plans):  # the first calls build graphs and buffers
                    found.setdefault((phase, overlap), []).append(row)
                launches = dict(counted)
                messages = sum(sum(x) for x in plan.traffic.messages.values())
                found[phase, overlap, "counts"] = launches, messages
                plan.traffic.clear()
        if comm.rank == 0:
            for phase in ("forward", "backward"):
                print(line(type(mask).__name__.lower(), phase, found), flush=True)
        for plan in plans.values():
            plan.free()
    grid.free()


def line(mask: str, phase: str, found: dict) -> str:
    """Format the medians of one mask and phase."""
    both = [dict(zip(COLUMNS, np.median(found[phase, x], axis=0))) for x in (True, False)]
    texts = [f"{x['total']:.2f}, wait {x['wait']:.2f}, host {x['host']:.2f}" for x in both]
    hidden = 1 - both[0]["wait"] / max(both[1]["wait"], 1e-9)
    launches, messages = found[phase, True, "counts"]
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(launches.items()))
    return (
        f"{mask:<7}{phase:<9} {texts[0]}; in turn {texts[1]}; hidden {hidden:.2f}; "
        f"launches: {kinds}; messages: {messages}"
    )


def counter() -> Counter:
    """Count the launches of this process from now on: of CUDA kernels, and of cuDNN's graphs."""
    from a2d_mpi.devices.cuda import Cuda
    from a2d_mpi.kernels.graphs import Launch

    counts: Counter = Counter()

    def count(owner: type, name: str, kind: str) -> None:
        method = getattr(owner, name)

        @wraps(method)
        def counted(*args, **options):
            counts[kind] += 1
            return method(*args, **options)

        setattr(owner, name, counted)

    count(Cuda, "_rows", "rows")
    count(Cuda, "attention", "plain")
    count(Launch, "__call__", "cuDNN")
    return counts


if __name__ == "__main__":
    main(MPI.COMM_WORLD, *map(int, sys.argv[1:]))
