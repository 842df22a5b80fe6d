"""What a type checker must know of the public names: `mypy` reads this file, nobody runs it."""

import numpy as np
from mpi4py import MPI
from typing_extensions import assert_type

from a2d_mpi import (
    Attention2D,
    Causal,
    Documents,
    Mask,
    ProcessGrid,
    RingAttention,
    make_mask,
    merge,
)

grid = ProcessGrid(MPI.COMM_WORLD, rows=2, cols=2)
attn = Attention2D(grid, Causal(), seqlen=1000, nheads=8, nheads_kv=2, headdim=32, slices=2)
ring = RingAttention(grid, make_mask("causal", 1000), seqlen=1000, nheads=8, headdim=32)
assert_type(make_mask("causal", 1000), Mask)
assert_type(attn.tokens, np.ndarray)
assert_type(attn.slices, tuple[int, int])
assert_type(attn.timings, dict[str, float])
assert_type(ring.area(), int)
q = np.zeros((len(attn.tokens), 8, 32), np.float32)
k = attn.scatter(np.zeros((1000, 2, 32), np.float32) if grid.comm.rank == 0 else None)
assert_type(k, np.ndarray)
packed = attn.with_mask(Documents([0, 600, 1000], causal=True))
out, lse = packed.forward(q, q, q)
assert_type(out, np.ndarray)
assert_type(merge([(out, lse), (out, lse)]), tuple[np.ndarray, np.ndarray])
assert_type(attn.gather(out), np.ndarray | None)
