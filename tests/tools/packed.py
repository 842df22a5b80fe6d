"""Seconds of plans of packed documents.

    mpiexec -n 4 python tests/tools/packed.py [TOKENS]

The documents are new in every trial.  Their lengths are lognormal.
"""

import sys
import time

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, Documents, ProcessGrid, SlidingWindow
from a2d_mpi.core.sizes import squarest

TRIALS = 9


def documents(seqlen, mean, seed, inside=None):
    """Draw packed causal documents, the same on all ranks."""
    rng, cu_seqlens = np.random.default_rng(seed), [0]
    while cu_seqlens[-1] < seqlen:
        length = 1 + int(mean * rng.lognormal(-0.5))
        cu_seqlens.append(min(seqlen, cu_seqlens[-1] + length))
    return Documents(cu_seqlens, inside=inside or Causal())


def timed(comm, make, *args, **options):
    """Call a function; return its result, and seconds and CPU seconds of the slowest rank."""
    comm.Barrier()
    start = time.perf_counter(), time.process_time()
    made = make(*args, **options)
    taken = time.perf_counter() - start[0], time.process_time() - start[1]
    return made, [comm.allreduce(x, MPI.MAX) for x in taken]


def plans(comm, grid, seqlen=1 << 17):
    """Print the median milliseconds of making plans, in turn."""
    sizes = {"seqlen": seqlen, "nheads": 8, "headdim": 64, "dtype": "bfloat16"}
    first, window = Attention2D(grid, Causal(), **sizes), SlidingWindow(1023)
    seconds = {}
    for step in range(TRIALS):
        few, many = (documents(seqlen, mean, step) for mean in (4096, 512))
        inside = documents(seqlen, 4096, step, window)
        masks = {"60 documents": few, "500 documents": many, "windows inside": inside}
        cases = [(name, x, None) for name, x in (*masks.items(), ("window & 60", window & few))]
        cases += [(f"60 documents, {x}", few, x) for x in ("zigzag", "contiguous", "balanced")]
        for name, mask, kind in cases:
            made = timed(comm, Attention2D, grid, mask, distribution=kind, **sizes)
            seconds.setdefault(name, []).append(made[1])
        if hasattr(first, "with_mask"):
            for name in ("60 documents, with_mask", "60 documents, kept"):
                mask = documents(seqlen, 4096, 1000 + step)
                seconds.setdefault(name, []).append(timed(comm, first.with_mask, mask)[1])
    if comm.rank == 0:
        print("plans of documents           ms   CPU ms of a rank")
        for name, taken in seconds.items():
            print("{:24} {:7.2f} {:8.2f}".format(name, *1e3 * np.median(taken, axis=0)))


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    grid = ProcessGrid(comm, *squarest(comm.size))
    plans(comm, grid, *map(int, sys.argv[1:]))
