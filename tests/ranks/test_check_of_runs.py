"""The check of a run passes right results and finds wrong ones, tensor by tensor."""

import numpy as np
import pytest
from cases import METHODS, NHEADS
from dense import problem_for, results_of
from helpers import assert_all, deeper

from a2d_mpi import Causal, Full
from a2d_mpi.checks.check import check_attention
from a2d_mpi.core.dtypes import DTYPES

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi, pytest.mark.grids]
N = 66
# Of logits of 1e4 a right run gets so much wrong, and no check can tell it: the float32 logits are
# off by 1e-3, 16-bit results by 4e-3 of themselves.
HUGE = {"float64": 1e-6, "float32": 0.01, "float16": 0.05, "bfloat16": 0.05}
CASES = [(1.0, "float32", 1e-3), *((2500.0, x, HUGE[x]) for x in DTYPES)]


@pytest.mark.parametrize("rows", [None, 16], ids=["full", "sample"])
@pytest.mark.parametrize("case", deeper(CASES, [CASES[0], (2500.0, "float32", 0.01)]), ids=str)
@pytest.mark.parametrize("method", METHODS[-2:], ids=["grid", "ring"])
def test_tensor_by_tensor(comm, grid_of, method, case, rows):
    """One wrong element on one rank fails, and NaN; so does another soft-cap."""
    (kind, shape), (size, dtype, error), usual = method, case, case is CASES[0]
    sizes = {"seqlen": N, "nheads": NHEADS, "headdim": 32, "dtype": dtype}
    more = {"nheads_kv": 1, "logit_softcap": 3.0} if usual else {}
    plan = kind(grid_of(*shape), Causal() if usual else Full(), **sizes, **more)
    given = problem_for(plan, size=size)
    found = results_of(plan, given)
    local = given.shards(plan) | found
    checks = check_attention(plan, local, rows)
    bad = [f"{name}: {x}" for name, x in checks.items() if not x.passed]
    bad += [f"checked {set(checks)}"] * (set(checks) != set(found))
    bad += [f"{x} counts {y.rows}" for x, y in checks.items() if rows is None and y.rows != N]
    for name in found if usual else ("lse", "out", "dv"):
        largest = comm.allreduce(float(np.abs(local[name]).max(initial=0)), op=max)
        bad += ["small logits"] * (name == "lse" and not usual and largest < 1e4)
        wrong = local[name].copy()
        if plan.tokens[-1:] == [N - 1]:  # which every sample has
            wrong.reshape(len(wrong), -1)[-1, 0] += largest * error
        told = check_attention(plan, {**local, name: wrong}, rows)[name]
        bad += [f"a wrong {name} passed: {told}"] * told.passed
    nan = {**local, "out": local["out"] * np.nan}
    bad += ["NaN passed"] * check_attention(plan, nan, rows)["out"].passed
    if usual:
        plan.logit_softcap = 3.01
        told = check_attention(plan, local, rows)
        bad += [f"another cap: {x} passed" for x in ("out", "lse") if told[x].passed]
    assert_all(comm, not bad, "; ".join(bad))
