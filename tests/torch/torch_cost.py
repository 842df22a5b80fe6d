"""What `attend` costs beyond the plan's own calls: seconds and memory.

    mpiexec -n 4 python tests/torch/torch_cost.py [TOKENS [TRIALS]]

Forward and backward, in turn, in one run; medians of the slowest rank.  Memory: the most that a
call allocates in NumPy, results included, once the buffers are there; and by how much the process
grows in the first calls of each, which counts what PyTorch allocates.  Exit code 1: the time, or
the memory in NumPy, is more than 2 % beyond the plan's own.  Needs the extra `torch`.
"""

import resource
import statistics
import sys
import time
import tracemalloc

import numpy as np
import torch
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, ProcessGrid
from a2d_mpi.torch import attend

MOST = 1.02  # of the plan's own
HEADS, HEADS_KV, HEADDIM = 8, 2, 64


def ways_of(plan):
    """Return a forward and a backward pass by the plan's calls, and through torch."""
    rng, n = np.random.default_rng(0), len(plan.tokens)
    heads = (HEADS, HEADS_KV, HEADS_KV, HEADS)
    q, k, v, dout = (rng.standard_normal((n, h, HEADDIM), np.float32) for h in heads)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    weight = torch.from_numpy(dout)

    def own():
        out, lse = plan.forward(q, k, v)
        return plan.backward(dout, q, k, v, out, lse)

    def through_torch():
        return torch.autograd.grad(attend(plan, *tensors), tensors, weight)

    return {"plan": own, "torch": through_torch}


def main(seqlen: int = 4096, trials: int = 15) -> int:
    """Print both, and return the exit code."""
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    rows = 2 if comm.size % 2 == 0 else 1
    grid = ProcessGrid(comm, rows, comm.size // rows)
    sizes = {"nheads": HEADS, "nheads_kv": HEADS_KV, "headdim": HEADDIM}
    small, plan = (Attention2D(grid, Causal(), seqlen=n, **sizes) for n in (64, seqlen))
    for call in ways_of(small).values():  # the libraries allocate, too
        call()
    ways = ways_of(plan)
    grown, largest = {}, {}
    for name, call in ways.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call()
        call()
        grown[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for name, call in ways.items():
        tracemalloc.start()
        call()
        largest[name] = comm.allreduce(tracemalloc.get_traced_memory()[1], MPI.MAX)
        tracemalloc.stop()
    seconds = {x: [] for x in ways}
    for trial in range(trials):
        # Each is first as often as the other.
        for name in sorted(ways, reverse=trial % 2 == 1):
            comm.Barrier()
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    medians = {name: statistics.median(x) for name, x in seconds.items()}
    ratios = [x["torch"] / x["plan"] for x in (medians, largest)]
    if comm.rank == 0:
        print(f"{seqlen} tokens, {HEADS} heads ({HEADS_KV}) of {HEADDIM}, {comm.size} ranks, "
              f"{trials} trials in turn")  # fmt: skip
        print("seconds: plan {plan:.4f}, torch {torch:.4f}".format(**medians), end="")
        print(f": {ratios[0]:.3f} of it")
        print(f"MiB that a call allocates: plan {largest['plan'] / 2**20:.2f}, torch "
              f"{largest['torch'] / 2**20:.2f}: {ratios[1]:.3f} of it")  # fmt: skip
        print(f"MiB by which rank 0 grew in the first calls: plan {grown['plan'] / 2**10:.1f}, "
              f"then torch {grown['torch'] / 2**10:.1f}")  # fmt: skip
    for x in (small, plan):
        x.free()
    grid.free()
    return int(max(ratios) > MOST)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
