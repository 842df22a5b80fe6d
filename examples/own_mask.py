"""A mask of one's own, checked against float64: mpiexec -n 4 python examples/own_mask.py"""

import numpy as np
from mpi4py import MPI

import a2d_mpi
from a2d_mpi.core.reference import attention

comm, n = MPI.COMM_WORLD, 300
i = np.arange(n)
# A query sees four keys at the beginning, which all see, and the 32 before it.
begin = np.stack([0 * i, np.maximum(i - 31, 4)])
end = np.stack([np.minimum(i + 1, 4), i + 1])
mask = a2d_mpi.IntervalMask(begin, end)

plan = a2d_mpi.Attention2D(
    a2d_mpi.ProcessGrid(comm, comm.size, 1), mask, seqlen=n, nheads=4, headdim=16
)
q, k, v = np.random.default_rng(0).standard_normal((3, n, 4, 16), np.float32)
out, _ = plan.forward(*(x[plan.tokens] for x in (q, k, v)))
exact, _ = attention(q, k, v, mask.dense(i, i), plan.softmax_scale)
error = comm.allreduce(np.abs(out - exact[plan.tokens]).max(initial=0), MPI.MAX)
print(f"rank {comm.rank}: largest error {error:.1e}, {plan.distribution.name} shards")
