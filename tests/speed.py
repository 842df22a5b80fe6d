"""Seconds of calls of some plans, for jobs/speed.sh; knows only the public interface.

python tests/speed.py OUTPUT SEQLEN,NHEADS,HEADDIM TRIALS METHOD:RxCxU[:BLOCK]...
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, NodeAwareAttention, ProcessGrid, RingAttention

METHODS = {
    "attention2d": Attention2D,
    "node_aware": NodeAwareAttention,
    "ring": RingAttention,
}


def main(output, sizes, trials, *plans):
    comm, found = MPI.COMM_WORLD, {}
    sizes = dict(zip(("seqlen", "nheads", "headdim"), map(int, sizes.split(","))))
    for name in plans:
        method, shape, *block = name.split(":")
        rows, cols, heads = map(int, shape.split("x"))
        sizes_of_block = map(int, block[0].split("x")) if block else (1, 1)
        grid = ProcessGrid(comm, rows, cols, heads=heads, block=tuple(sizes_of_block))
        plan = METHODS[method](grid, Causal(), **sizes)
        shape = len(plan.tokens), sizes["nheads"], sizes["headdim"]
        rng = np.random.default_rng(comm.rank)
        q, k, v, dout = (rng.standard_normal(shape, np.float32) for _ in range(4))
        seconds = {"forward": [], "backward": []}
        for _ in range(1 + int(trials)):
            for phase in seconds:
                comm.Barrier()
                start = time.perf_counter()
                if phase == "forward":
                    out, lse = plan.forward(q, k, v)
                else:
                    plan.backward(dout, q, k, v, out, lse)
                seconds[phase].append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
        found |= {f"{name} {phase}": float(np.median(x[1:])) for phase, x in seconds.items()}
        plan.free()
        grid.free()
    if comm.rank == 0:
        with open(output, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
