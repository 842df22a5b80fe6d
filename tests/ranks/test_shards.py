"""Whole sequences on one rank to shards on all ranks, and back."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_all
from refused import assert_raises

from a2d_mpi import Causal, Documents, Full, ProcessGrid
from a2d_mpi.attention.methods import make_plan

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi]
SIZES = {"nheads": 2, "headdim": 4}
# Method, distribution, mask, tokens of queries and of keys: uneven, empty shards, two sequences.
CASES = [
    ("attention2d", None, Causal(), 29, None),
    ("ring", "striped", Full(), 3, None),
    ("ring", "balanced", Documents(np.array([0, 5, 31]), causal=True), 31, None),
    ("attention2d", "contiguous", Full(), 7, 18),
]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def grid(comm):
    # Ranks of the grid are not those of `comm`.
    rows = 2 if comm.size % 2 == 0 else 1
    grid = ProcessGrid(comm, rows, comm.size // rows, order="cru")
    yield grid
    grid.free()


def plan_of(grid, case):
    method, distribution, mask, n, m = case
    return make_plan(method, grid, mask, seqlen=n, seqlen_kv=m, distribution=distribution, **SIZES)


def whole_array(n, dtype, row):
    """Return an array of distinct elements, as far as the dtype allows."""
    count = n * int(np.prod(row))
    return np.arange(count).reshape(n, *row).astype(dtype)


@pytest.mark.multirank
@pytest.mark.parametrize("case", CASES, ids=[f"{x[0]}-{x[3]}" for x in CASES])
def test_there_and_back(grid, case):
    plan = plan_of(grid, case)
    comm, wrong = grid.comm, []
    for dtype, row, root in (
        (np.int64, (), 0), (np.float32, (2, 4), comm.size - 1), (BFLOAT16, (3,), 1),
        (bool, (), 0), (np.complex128, (1, 0), 0), ("U3", (2,), 1),
    ):  # fmt: skip
        whole = whole_array(plan.seqlen, dtype, row)
        own = plan.scatter(whole if comm.rank == root else None, root)
        back = plan.gather(own, root)
        if own.dtype != whole.dtype or not np.array_equal(own, whole[plan.tokens]):
            wrong.append(f"shard of {dtype} {row}")
        if (back is None) != (comm.rank != root):
            wrong.append(f"on which rank {dtype} {row} is")
        elif back is not None and not np.array_equal(back, whole):
            wrong.append(f"whole {dtype} {row}")
    keys = whole_array(plan.config.seqlen_kv, np.float32, (2, 4))
    own = plan.scatter_kv(keys[::-1] if comm.rank == 0 else None)  # not contiguous
    if not np.array_equal(own, keys[::-1][plan.tokens_kv]):
        wrong.append("keys")
    assert_all(comm, not wrong, f"{wrong}")


@pytest.mark.multirank
def test_refused(grid):
    plan, comm = plan_of(grid, CASES[0]), grid.comm
    n, first = len(plan.tokens), comm.rank == 0
    good = np.zeros((29, 2))
    refusal, both = "no good", "the call: scatter of plan"
    cases = [
        (lambda: plan.scatter(good[1:] if first else None),
         "x has shape (28, 2) and dtype float64, but the sequence has 29 tokens"),
        (lambda: plan.scatter(None), "x must be a NumPy or CuPy array, got NoneType (on rank 0)"),
        (lambda: plan.scatter(np.array(3.0)), "x has shape () and dtype float64"),
        (lambda: plan.scatter(np.full(29, Fraction(1))), "dtype object"),
        (lambda: plan.scatter(good, comm.size), f"root must be at most {comm.size - 1}, got "),
        (lambda: plan.scatter(good, "0"), "root must be a whole number of at least 0, got '0'"),
        (lambda: plan.scatter(good, 0 if first else 1), "on root: 0 on rank 0, 1 on rank 1"),
        (lambda: plan.gather(np.zeros(n + first)), "this shard has "),
        (lambda: plan.gather(np.zeros((n, 2 + first))), "on shape of a row: (3,) on rank 0"),
        (lambda: plan.gather(np.zeros(n, "f4" if first else "f8")), "on dtype: float32"),
        (lambda: plan.scatter(good) if first else plan.gather(np.zeros(n)), both),
        (lambda: plan.refuse(refusal) if first else plan.forward(*qkv(plan)), refusal),
    ]  # fmt: skip
    for action, text in cases:
        assert_raises(comm, text, action)
    plan.forward(*qkv(plan))  # the plan is as good as before


def qkv(plan):
    return [np.zeros((len(plan.tokens), 2, 4), np.float32)] * 3


@pytest.mark.parametrize("cupy", ["emulated"], indirect=True)
def test_cupy(grid, cupy):
    """CuPy arrays on the root make CuPy arrays on all ranks."""
    plan, comm = plan_of(grid, CASES[0]), grid.comm
    whole = whole_array(29, np.float32, (2, 4))
    own = plan.scatter(cupy.asarray(whole) if comm.rank == 0 else None)
    back = plan.gather(own)
    good = isinstance(own, cupy.ndarray) and np.array_equal(cupy.asnumpy(own), whole[plan.tokens])
    if comm.rank == 0:
        good &= isinstance(back, cupy.ndarray) and np.array_equal(cupy.asnumpy(back), whole)
    assert_all(comm, good, "another array")
