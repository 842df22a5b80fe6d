"""Compare the memory by which processes grow with the prediction.

    python tests/tools/memory.py          all cases; of each the rank whose prediction is worst
    python tests/tools/memory.py 3 14     the fourth and the fifteenth

Measured on every rank: the peak of its resident memory (VmHWM of Linux) in one forward and perhaps
one backward call, minus its resident memory before its arrays and the plan are made.  Predicted:
`predicted_memory` of the plan, in which a kernel has a constant.  The exit code is 1 if any is off
by more than a fifth.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

TOLERANCE = 0.2
# Ranks, method, grid (rows x cols x heads), mask, tokens, query heads, KV heads,
# headdim, dtype, kernel, phases, and after a star the slices of the heads.
CASES = """
1 Attention2D 1x1x1 causal 4096 8 2 64 float32 numba 2
1 Attention2D 1x1x1 full 2048 32 32 64 float32 numba 1
1 Attention2D 1x1x1 causal 2048 32 8 128 bfloat16 numpy 2
1 Attention2D 1x1x1 sliding_window_causal:256 65536 1 1 64 float32 numba 2
2 Attention2D 1x2x1 causal 6144 8 8 64 float32 numpy 2
2 Attention2D 2x1x1 causal 6144 8 8 64 float32 numba 2
2 RingAttention 2x1x1 causal 6000 8 4 64 float64 numpy 2
2 RingAttention 1x2x1 full 4096 16 16 64 float32 numba 1
2 Attention2D 1x1x2 causal 4096 16 16 64 float32 numpy 2
2 Attention2D 2x1x1 sliding_window_causal:512 32768 1 1 128 float32 numpy 2
3 TriangleAttention 1x3x1 causal 6144 8 8 64 float32 numpy 2
4 Attention2D 2x2x1 causal 8192 8 8 64 float32 numba 2
4 Attention2D 2x2x1 full 4096 32 32 64 float16 numba 2
4 Attention2D 4x1x1 sliding_window_causal:1024 16384 4 1 128 float32 numpy 2
4 RingAttention 2x2x1 causal 8192 32 8 64 bfloat16 numpy 2
4 Attention2D 2x2x1 causal 8192 8 8 64 float32 numpy 2*4
4 Attention2D 2x2x1 causal 8192 32 8 64 bfloat16 numba 2*16
4 Attention2D 1x2x2 causal 8192 32 32 64 float32 numpy 2*8
4 DoubleRingAttention 2x2x1 causal 8192 8 8 64 float32 numba 2
4 Attention2D 2x1x2 causal_document:0,3000,8192 8192 16 4 64 float32 numpy 2
4 NodeAwareAttention 2x2x1 causal 8192 8 8 64 float32 numpy 2
1 Attention2D 1x1x1 causal 4096 8 8 64 bfloat16 onednn 2
4 Attention2D 2x2x1 causal 8192 32 8 64 bfloat16 onednn 2
""".strip().splitlines()


def main(*numbers):
    """Print a line for each case, and return the exit code."""
    from helpers import launch

    # Numba compiles at the first import ever, which takes more memory.
    launch(0, "-c", "import a2d_mpi.kernels.compiled")
    print("   predicted  measured, MB     off  ranks, case")
    worst = 0.0
    for number in map(int, numbers or range(len(CASES))):
        predicted, measured = one(launch, number)
        off = predicted / measured - 1
        worst = max(worst, abs(off))
        line = f"{number:2}{predicted / 1e6:10.1f}{measured / 1e6:10.1f}{off:+12.1%}"
        print(f"{line}  {CASES[number]}", flush=True)
    return worst > TOLERANCE


def one(launch, number):
    """Return predicted and measured bytes of the rank with the worst prediction."""
    ranks = int(CASES[number].split()[0])
    done = launch(ranks, __file__, "--rank", number, env={"OMP_NUM_THREADS": "1"})
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return max(found, key=lambda x: abs(x[0] / x[1] - 1))


def rank(number):
    """Measure one case on the ranks of this job."""
    import numpy as np
    from mpi4py import MPI

    from a2d_mpi import ProcessGrid
    from a2d_mpi.attention import methods
    from a2d_mpi.masks.patterns import make_mask

    _, method, grid, mask, *sizes, dtype, kernel, phases = CASES[number].split()
    seqlen, nheads, nheads_kv, headdim = map(int, sizes)
    rows, cols, heads = map(int, grid.split("x"))
    comm, mask = MPI.COMM_WORLD, make_mask(mask, seqlen)
    grid = ProcessGrid(comm, rows, cols, heads=heads)
    phases, _, slices = phases.partition("*")
    rng, backward = np.random.default_rng(comm.rank), phases == "2"
    rng.standard_normal(1, np.float32)
    comm.Barrier()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    plan = getattr(methods, method)(
        grid, mask, seqlen=seqlen, nheads=nheads, nheads_kv=nheads_kv, headdim=headdim,
        dtype=dtype, kernel=kernel, threads=1, slices=int(slices or 1),
    )  # fmt: skip
    q, k, v, *dout = (
        rng.standard_normal((len(plan.tokens), h, headdim), np.float32).astype(
            plan.dtype, copy=False
        )
        for h in (nheads, nheads_kv, nheads_kv, nheads)[: 3 + backward]
    )
    out, lse = plan.forward(q, k, v)
    if backward:
        gradients = plan.backward(*dout, q, k, v, out, lse)
        del gradients
    measured = status("VmHWM") - before
    predicted = plan.predicted_memory(backward)
    for line in comm.gather(json.dumps([predicted, measured])) or ():
        print(line)


def status(name):
    """Return a number of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(rank(int(sys.argv[2])) if sys.argv[1:2] == ["--rank"] else main(*sys.argv[1:]))
