"""Digests of results, bytes and messages, which must not change while code is rebuilt.

    mpiexec -n 6 python tests/tools/net.py OUTPUT.json
    python tests/tools/net.py --compare FOLDER

The first command runs about 220 small configurations by the public interface.  For each
configuration it writes a digest of every result and the traffic of every rank.  Results differ
between CPUs in their bits.  Traffic is the same on all machines: tests/support/traffic.json has
it, and `test_net.py` compares it with the predictions.  The second command lists the differences
between the files then*.json and now*.json of a folder, which `python jobs/run.py net` makes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path

import ml_dtypes
import numpy as np
from mpi4py import MPI

from a2d_mpi import (
    Attention2D,
    Causal,
    Documents,
    DoubleRingAttention,
    Full,
    IntervalMask,
    Mask,
    NodeAwareAttention,
    ProcessGrid,
    RingAttention,
    SlidingWindow,
    TriangleAttention,
)

RANKS = 6
NHEADS, HEADDIM = 4, 8
RESULTS = ("out", "lse", "dq", "dk", "dv")
DTYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16}
CUTS = (0.1, 0.15, 0.6, 0.62, 0.9)  # ends of documents, as shares of the sequence
# Node of every rank of a grid, for node-aware plans: even and uneven ones.
NODES = {
    (2, 3, 1): (0, 0, 0, 1, 1, 1),
    (3, 2, 1): (0, 0, 1, 1, 1, 2),
    (1, 6, 1): (0, 0, 1, 1, 2, 2),
    (4, 1, 1): (0, 0, 1, 1),
    (1, 2, 2): (0, 1, 0, 1),
}
# Method, and what its constructor takes.
METHODS = {
    "attention2d": (Attention2D, {}),
    "ring": (RingAttention, {}),
    "striped ring": (RingAttention, {"distribution": "striped"}),
    "double ring": (DoubleRingAttention, {}),
    "triangle": (TriangleAttention, {}),
    "node aware": (NodeAwareAttention, {}),
}
# With the grid: rows, columns, heads.
PLANS = (
    *(("attention2d", x) for x in ((2, 2, 1), (2, 3, 1), (3, 2, 1), (1, 5, 1), (4, 1, 1))),
    *(("attention2d", x) for x in ((2, 1, 2), (1, 3, 2), (1, 1, 4))),
    *(("ring", x) for x in ((4, 1, 1), (3, 1, 2))),  # with heads it is USP
    *(("striped ring", x) for x in ((5, 1, 1),)),
    *(("double ring", x) for x in ((2, 3, 1), (2, 2, 1))),
)
MORE_PLANS = (
    *(("triangle", x) for x in ((3, 1, 1), (6, 1, 1), (3, 1, 2))),
    *(("node aware", x) for x in NODES),
)
# Mask, dtype, nheads_kv, seqlen, overlap.
VARIANTS = (
    ("causal", "float32", 4, 97, True),
    ("causal", "float32", 2, 3, True),
    ("causal", "bfloat16", 1, 60, True),
    ("full", "float32", 4, 61, False),
    ("window", "float64", 2, 53, True),
    # Between two ranks chunks are cut in units, and work on the own one is kept for the end.
    ("causal", "float32", 2, 1210, True),
)
MORE_VARIANTS = (
    ("documents", "float32", 2, 131, True),
    ("documents", "bfloat16", 4, 1100, False),
    ("sliding", "float32", 4, 118, True),
    ("sliding and documents", "float64", 1, 77, True),
)


def configurations() -> Iterator[tuple]:
    """Return name, method, shape and variant of each configuration."""
    first = product(PLANS, VARIANTS)
    more = chain(product(MORE_PLANS, VARIANTS + MORE_VARIANTS), product(PLANS, MORE_VARIANTS))
    for (method, shape), variant in chain(first, more):
        mask, dtype, nheads_kv, seqlen, overlap = variant
        if nheads_kv % shape[2] and shape[2] % nheads_kv:
            continue
        if method == "triangle" and mask != "causal":
            continue
        name = f"{method} {'x'.join(map(str, shape))} {mask} {dtype} kv{nheads_kv} n{seqlen}"
        yield name + " in turn" * (not overlap), method, shape, variant


def make_mask(name: str, seqlen: int) -> Mask:
    """Make the mask of a variant."""
    tokens = np.arange(seqlen)
    packed = Documents([0, *(int(x * seqlen) for x in CUTS), seqlen])
    window = SlidingWindow(seqlen // 7)
    return {
        "causal": Causal(),
        "full": Full(),
        "window": IntervalMask(tokens - 9, tokens + 2),
        "documents": packed,
        "sliding": window,
        "sliding and documents": window & packed,
    }[name]


def run(grid: ProcessGrid, method: str, variant: tuple) -> dict[str, object]:
    """Run one configuration; return digests on rank 0 and the traffic of every rank."""
    mask, dtype, nheads_kv, seqlen, overlap = variant
    kind, options = METHODS[method]
    sizes = {"seqlen": seqlen, "nheads": NHEADS, "nheads_kv": nheads_kv, "headdim": HEADDIM}
    plan = kind(grid, make_mask(mask, seqlen), dtype=dtype, overlap=overlap, **sizes, **options)
    rng = np.random.default_rng(0)
    dout, q, k, v = (
        rng.standard_normal((seqlen, heads, HEADDIM)).astype(DTYPES[dtype])[plan.tokens]
        for heads in (NHEADS, NHEADS, nheads_kv, nheads_kv)
    )
    out, lse = plan.forward(q, k, v)
    results = (out, lse, *plan.backward(dout, q, k, v, out, lse))
    digests = grid.comm.gather([hashlib.sha256(x.tobytes()).hexdigest() for x in results])
    counted = [
        {"/".join(key): both for key, both in sorted(what.items())}
        for what in (plan.traffic.bytes, plan.traffic.messages)
    ]
    everyone = grid.comm.gather(counted)
    plan.free()
    if grid.comm.rank != 0:
        return {}
    bits = {
        name: hashlib.sha256("".join(x).encode()).hexdigest()[:16]
        for name, x in zip(RESULTS, zip(*digests))
    }
    traffic, messages = ([x[i] for x in everyone] for i in range(2))
    return {"bits": bits, "bytes": traffic, "messages": messages}


def run_all(comm: MPI.Intracomm) -> dict[str, dict]:
    """Run all configurations; return them by name on rank 0 of `comm`."""
    grids: dict[tuple, ProcessGrid] = {}
    found = {}
    for name, method, shape, variant in configurations():
        size = int(np.prod(shape))
        part = comm.Split(0 if comm.rank < size else MPI.UNDEFINED)
        if part != MPI.COMM_NULL:
            nodes = NODES[shape] if method == "node aware" else None
            if (shape, nodes) not in grids:
                grids[shape, nodes] = ProcessGrid(part, *shape, nodes=nodes)
            found[name] = run(grids[shape, nodes], method, variant)
            part.Free()
    for grid in grids.values():
        grid.free()
    return found


def main(path: str) -> None:
    """Write the file."""
    if MPI.COMM_WORLD.size != RANKS:
        raise SystemExit(f"needs {RANKS} ranks, has {MPI.COMM_WORLD.size}")
    found = run_all(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        with open(path, "w") as file:
            json.dump(found, file, indent=1)
        print(f"{len(found)} configurations written to {path}")


def compare(folder: str) -> int:
    """Print each difference between two files; return 1 if there are any."""
    files = (next(Path(folder).glob(f"{name}*.json")) for name in ("then", "now"))
    then, now = (json.loads(file.read_text()) for file in files)
    different = [
        f"{name}: {kind}"
        for name in then
        for kind in then[name]
        if now.get(name, {}).get(kind) != then[name][kind]
    ]
    print("\n".join(different) or f"{len(then)} configurations: the same bits, bytes and messages")
    return int(bool(different) or then.keys() != now.keys())


if __name__ == "__main__":
    sys.exit(compare(sys.argv[2]) if sys.argv[1] == "--compare" else main(*sys.argv[1:]))
