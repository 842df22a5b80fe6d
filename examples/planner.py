"""Ask the planner for a grid, and compute on it: mpiexec -n 4 python examples/planner.py"""

from pathlib import Path

import numpy as np
from mpi4py import MPI

from a2d_mpi import Causal, ProcessGrid
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.planning.planner import best_candidate
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.planning.workload import Workload

comm = MPI.COMM_WORLD
machine = read_machine(Path(__file__).parents[1] / "data/machines/h100-8.toml")
work = Workload(4096, nheads=8, nheads_kv=2, headdim=32, mask=Causal())
best = best_candidate(machine, comm.size, work)  # method, grid, slices, predicted seconds

grid = ProcessGrid.from_layout(comm, best.layout)
plan = make_plan(best.method, grid, work.mask, **work.arguments)
q, k, v = (np.ones((len(plan.tokens), x, 32), plan.dtype) for x in (8, 2, 2))
plan.forward(q, k, v)
took = comm.allreduce(plan.timings["forward/total"], MPI.MAX)
print(f"{best.layout.shape}: {best.seconds:.1e} s predicted on H100s, {took:.4f} s here")
