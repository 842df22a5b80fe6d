"""Attention and its gradients, each rank with its shard: mpiexec -n 4 python examples/plan.py"""

import numpy as np
from mpi4py import MPI

import a2d_mpi

comm = MPI.COMM_WORLD
grid = a2d_mpi.ProcessGrid(comm, rows=1 + (comm.size > 1), cols=max(1, comm.size // 2))
sizes = {"seqlen": 1000, "nheads": 8, "nheads_kv": 2, "headdim": 32}
attn = a2d_mpi.Attention2D(grid, a2d_mpi.Causal(), **sizes)

rng, n = np.random.default_rng(comm.rank), len(attn.tokens)  # tokens of this rank's shard
q, dout = rng.standard_normal((2, n, 8, 32), np.float32)
k, v = rng.standard_normal((2, n, 2, 32), np.float32)

out, lse = attn.forward(q, k, v)  # (n, 8, 32), (n, 8)
dq, dk, dv = attn.backward(dout, q, k, v, out, lse)
seconds = attn.timings["forward/total"] + attn.timings["backward/total"]
received = sum(x for _, x in attn.traffic.bytes.values())
print(f"rank {comm.rank}: {n} tokens, {1e3 * seconds:.1f} ms, {received} bytes received")
