"""NaN and infinite elements reach the results that depend on them, and no others."""

import numpy as np
import pytest
from cases import GRIDS, run
from helpers import assert_all, deeper
from test_bad_input import assert_raises

from a2d_mpi import Attention2D, Causal, Full, IntervalMask, ProcessGrid
from a2d_mpi import RingAttention as Ring

N, H, HKV, D = 67, 4, 2, 8
GROUP = H // HKV
TOKEN, HEAD = 40, 1  # where it stands, of q and dout heads or of k and v heads
DOCUMENTS = IntervalMask(np.where(np.arange(N) < 30, 0, 30), np.where(np.arange(N) < 30, 30, N))
WINDOW = IntervalMask(np.arange(N) - 5, np.arange(N) + 3)

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi]


@pytest.fixture(scope="module")
def grid(comm):
    grid = ProcessGrid(comm, *GRIDS[len(GRIDS) // 2])
    yield grid
    grid.free()


def reached(name, visible):
    """Return which (query, head) and (key, head) depend on an element that is not finite."""
    heads = [HEAD] if name in ("q", "dout") else range(HEAD * GROUP, (HEAD + 1) * GROUP)
    queries = np.zeros((N, H), bool)
    seeing = np.arange(N) == TOKEN if name in ("q", "dout") else visible[:, TOKEN]
    queries[:, heads] = seeing[:, None]
    keys = np.zeros((N, HKV), bool)
    keys[:, heads[0] // GROUP] = visible[seeing].any(axis=0)
    return queries, keys


@pytest.mark.parametrize("method", [Attention2D, Ring])
@pytest.mark.parametrize("mask", deeper([DOCUMENTS, WINDOW, Causal(), Full()], [WINDOW]), ids=repr)
@pytest.mark.parametrize("distribution", deeper(["zigzag", "striped"], ["zigzag"]))
def test_stays_where_it_is_seen(comm, grid, method, mask, distribution):
    sizes = {"seqlen": N, "nheads": H, "nheads_kv": HKV, "headdim": D}
    plan = method(grid, mask, distribution=distribution, **sizes)
    visible = mask.dense(np.arange(N), np.arange(N))
    rng = np.random.default_rng(0)
    heads = {"q": H, "k": HKV, "v": HKV, "dout": H}
    clean = {x: rng.standard_normal((N, h, D), np.float32) for x, h in heads.items()}
    expected = run(plan, *clean.values())
    for name, value in (("q", np.nan), ("k", np.nan), ("v", np.inf), ("dout", np.nan)):
        given = {x: y.copy() for x, y in clean.items()}
        given[name][TOKEN, HEAD, 3] = value
        found = run(plan, *given.values())
        queries, keys = (x[plan.tokens] for x in reached(name, visible))
        for result, x in found.items():
            may = keys if result in ("dk", "dv") else queries
            same = np.isclose(x[~may], expected[result][~may], 1e-4, 1e-5).all()
            assert_all(comm, same, f"{value} in {name} changes {result} elsewhere")
        if name == "dout":  # v of these queries' results, and k of their keys
            ok = np.isnan(found["dq"][queries]).any(-1).all()
        else:
            ok = (~np.isfinite(found["out"][queries])).any(-1).all()
        assert_all(comm, ok, f"{value} in {name} does not reach all that depend on it")


def test_check_finite(comm, grid):
    sizes = {"seqlen": N, "nheads": H, "headdim": D}
    plan = Attention2D(grid, Causal(), check_finite=True, **sizes)
    q, k, v = np.ones((3, len(plan.tokens), H, D), np.float32)
    k[:] = 1e38  # its sum is infinite, itself it is not
    out, lse = plan.forward(q, k, v)
    bad = v.copy()
    if comm.rank == comm.size - 1:
        bad[0, 0, 0] = -np.inf
    text = "v: NaN or infinite elements (check_finite)"
    assert_raises(comm, text, plan.forward, q, k, bad)
    masked = lse.copy()
    masked[:1] = -np.inf  # a query that sees no key
    plan.backward(out, q, k, v, out, masked)
