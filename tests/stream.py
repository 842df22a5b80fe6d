"""Memory and time of streamed tiles, beside gathered ones and rings.

python tests/stream.py             predicted buffers of 8 x 8 and 16 x 16 ranks
python tests/stream.py plans [8]   16M tokens on 256 A100: memory, simulated time; KV heads
mpiexec -n 4 python tests/stream.py [TOKENS]   measured on 2 x 2 and 4 ranks: buffers, seconds
"""

import sys
from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, ProcessGrid, RingAttention
from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import Layout
from a2d_mpi.planning.memory import buffers
from a2d_mpi.planning.planner import candidate
from a2d_mpi.planning.profile import read_machine
from a2d_mpi.schedules import problem_of
from a2d_mpi.schedules.problem import Workload

# Method, rows, columns, ranks that share the heads, order, streamed.
PLANS = """
ring 8 1 32 rcu 0
attention2d 16 16 1 rcu 0
attention2d 8 8 4 rcu 0
attention2d 4 8 8 rcu 0
attention2d 2 8 16 rcu 0
attention2d 16 16 1 rcu 1
attention2d 4 64 1 rcu 1
attention2d 8 8 4 rcu 1
attention2d 4 8 8 rcu 1
attention2d 2 16 8 rcu 1
attention2d 2 8 16 rcu 1
attention2d 1 32 8 rcu 1
ring 256 1 1 rcu 0
""".strip().splitlines()


def tables():
    """Buffers of the rank that has the most of four, in shards of q."""
    tokens = 4096
    print("ranks  KV heads  method  grid  forward  with backward, in shards of q in bfloat16")
    for size in (8, 16):
        ranks = size * size
        for nheads_kv in (32, 8):
            config = AttentionConfig(tokens * ranks, 32, 128, nheads_kv, dtype="bfloat16")
            for method, layout in (
                ("ring", Layout(ranks, 1)),
                ("attention2d", Layout(size, size)),
                ("attention2d", Layout(size, size, stream=True)),
                ("attention2d", Layout(ranks, 1, stream=True)),
                ("attention2d", Layout(1, ranks, stream=True)),
            ):
                problem = problem_of(method, layout, config, Causal())
                held = [
                    max(buffers(method, layout, problem, x, y) for x in (0, size, ranks - 1))
                    for y in (False, True)
                ]
                found = [f"{x / (tokens * config.nbytes('q')):.1f}" for x in held]
                print(ranks, nheads_kv, method, grid_of(layout), *found, flush=True)


def grid_of(layout):
    return f"{layout.rows}x{layout.cols}x{layout.heads}" + " streamed" * layout.stream


def plans(nheads_kv="32"):
    """Whether plans fit, and their simulated seconds."""
    machine = read_machine("data/machines/a100-16x4.toml")
    work = Workload(
        1 << 24, nheads=32, headdim=128, nheads_kv=int(nheads_kv), mask=Causal(), backward=True
    )
    room = machine.memory - machine.reserved
    print(f"16M tokens, 256 ranks, {nheads_kv} KV heads; a rank has {room / 1e9:g} GB")
    for line in PLANS:
        *method, rows, cols, heads, order, stream = line.split()
        layout = Layout(int(rows), int(cols), int(heads), order, stream=stream == "1")
        try:
            found = candidate(machine, " ".join(method), layout, work, room)
        except ValueError as error:
            print(line, error)
            continue
        fits = "fits" if found.fits else "does not fit"
        seconds = f"{found.seconds:.1f} s"
        print(*method, grid_of(layout), f"{found.memory / 1e9:.1f} GB", fits, seconds, flush=True)


def measured(tokens="32768", trials="1"):
    """Buffers and seconds of a forward and a backward call."""
    comm, rng = MPI.COMM_WORLD, np.random.default_rng(0)
    sizes = {"seqlen": int(tokens), "nheads": 8, "headdim": 64, "threads": 1}
    for method, rows, cols, options in (
        (RingAttention, 4, 1, {}),
        (Attention2D, 2, 2, {}),
        (Attention2D, 2, 2, {"stream": True}),
        (Attention2D, 1, 4, {}),
        (Attention2D, 1, 4, {"stream": True}),
        (Attention2D, 4, 1, {}),
        (Attention2D, 4, 1, {"stream": True}),
    ):
        grid = ProcessGrid(comm, rows, cols)
        plan = method(grid, Causal(), **sizes, **options)
        shape = len(plan.tokens), 8, 64
        dout, q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(4))
        seconds = []
        for _ in range(int(trials)):
            comm.Barrier()
            start = perf_counter()
            out, lse = plan.forward(q, k, v)
            middle = perf_counter()
            plan.backward(dout, q, k, v, out, lse)
            seconds.append((middle - start, perf_counter() - middle))
        forward, backward = (median(comm.allreduce(x, MPI.MAX) for x in y) for y in zip(*seconds))
        predicted = buffers(plan.method, plan.layout, plan.problem, comm.rank, True)
        held = comm.gather((plan.buffer_bytes, predicted))
        if comm.rank == 0:
            most = max(held)
            print(
                f"{plan.method} {grid_of(plan.layout)}: buffers {most[0] / 1e6:.1f} MB, predicted "
                f"{most[1] / 1e6:.1f} MB, equal on all ranks: {all(x == y for x, y in held)}; "
                f"forward {forward:.2f} s, backward {backward:.2f} s",
                flush=True,
            )
        plan.free()
        grid.free()


if __name__ == "__main__":
    if MPI.COMM_WORLD.size > 1:
        measured(*sys.argv[1:])
    elif sys.argv[1:2] == ["plans"]:
        plans(*sys.argv[2:])
    else:
        tables()
