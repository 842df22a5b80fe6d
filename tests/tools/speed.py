"""Seconds of calls of some plans, for `python jobs/run.py speed`; knows only the public interface.

python tests/tools/speed.py OUTPUT SEQLEN,NHEADS,HEADDIM TRIALS METHOD:RxCxU[:BLOCK]...
python tests/tools/speed.py --compare FOLDER    medians of then.*.json and now.*.json, their ratio
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
from mpi4py import MPI

from a2d_mpi import Attention2D, Causal, NodeAwareAttention, ProcessGrid, RingAttention

METHODS = {"attention2d": Attention2D, "node_aware": NodeAwareAttention, "ring": RingAttention}


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


def compare(folder):
    seconds = {}
    for path in sorted(Path(folder).glob("*.json")):
        for name, x in json.loads(path.read_text()).items():
            seconds.setdefault(name, {}).setdefault(path.name.split(".")[0], []).append(x)
    for name, trees in seconds.items():
        then, now = (sorted(trees[x]) for x in ("then", "now"))
        print(
            f"{name:<28} then {median(then):.4g} s ({then[0]:.4g} to {then[-1]:.4g}), "
            f"now {median(now):.4g} s ({now[0]:.4g} to {now[-1]:.4g}): "
            f"{median(now) / median(then) - 1:+.1%}"
        )


if __name__ == "__main__":
    compare(sys.argv[2]) if sys.argv[1] == "--compare" else main(*sys.argv[1:])
