"""The page, plans and dense attention agree, on every grid of the ranks of this run."""

import pytest
from cases import GRIDS
from dense import problem_for, results_of, wrong_in
from helpers import assert_all
from oracles import Intervals, documents

from a2d_mpi import Attention2D, Causal, Full, onepage

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi]
MASKED = Intervals(([5] * 41, [0] * 20 + [9] * 21), ([30] * 41, [0] * 10 + [31] * 31))
PACKED = documents([3, 1, 20, 17])
CASES = {
    "full": (41, Full()), "causal": (41, Causal()), "packed": (41, PACKED), "holes": (41, MASKED),
    "two tokens": (2, Causal()),
}  # fmt: skip


@pytest.mark.parametrize("distribution", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_three_agree(comm, grid_of, shape, case, distribution):
    """All five results of the page and of the plan are within 1e-12 of dense attention."""
    seqlen, mask = CASES[case]
    sizes = {"seqlen": seqlen, "nheads": 4, "nheads_kv": 2, "headdim": 8, "dtype": "float64"}
    plan = Attention2D(grid_of(*shape), mask, distribution=distribution, **sizes)
    given, (r, c) = problem_for(plan), divmod(comm.rank, shape[1])
    row, col = comm.Split(r), comm.Split(c)
    q, k, v, dout = given.shards(plan).values()
    mine, scale = (row, col, plan.tokens, plan.tokens), plan.softmax_scale
    out, lse = onepage.forward(*mine, q, k, v, plan.mask, softmax_scale=scale)
    more = out, lse, plan.mask
    dq, dk, dv = onepage.backward(*mine, dout, q, k, v, *more, softmax_scale=scale)
    page = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    bad = wrong_in(plan, page, given) + wrong_in(plan, results_of(plan, given), given)
    for x in (row, col):
        x.Free()
    assert_all(comm, not bad, "; ".join(bad))
