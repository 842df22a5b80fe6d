"""One plan called again: new data, changed arrays, and earlier data."""

import numpy as np
import pytest
from cases import SIZE
from dense import plain
from helpers import assert_all, distance

from a2d_mpi import Causal
from a2d_mpi.attention.methods import make_plan
from a2d_mpi.schedules import METHODS
from a2d_mpi.sharding import triangle

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi, pytest.mark.grids]
SEQLEN, NHEADS, HEADDIM = 41, 12, 8
NAMES = ("out", "lse", "dq", "dk", "dv")


def data(seed):
    """Return q, k, v and dout of the whole sequence, and float64 results."""
    rng = np.random.default_rng(seed)
    whole = [rng.standard_normal((SEQLEN, NHEADS, HEADDIM)) for _ in range(4)]
    return whole, plain(whole, np.tri(SEQLEN, dtype=bool), HEADDIM**-0.5)


@pytest.mark.parametrize("method", METHODS)
def test_same_plan_new_data(comm, grid_of, method):
    """Each of five calls returns results of its data, which later calls keep."""
    known = METHODS[method]
    heads = SIZE if known.causal and not triangle.fits(SIZE) else 1
    rows = 1 if heads > 1 or SIZE % 2 else 2
    grid = grid_of(rows, SIZE // rows // heads, heads)
    sizes = {"seqlen": SEQLEN, "nheads": NHEADS, "headdim": HEADDIM, "dtype": "float64"}
    plan = make_plan(method, grid, Causal(), **sizes)
    sets = [data(0), data(1)]
    shards = [[x[plan.tokens] for x in whole] for whole, _ in sets]
    refilled = [x.copy() for x in shards[0]]
    bits, calls, bad = [[x.tobytes() for x in shard] for shard in shards], [], []
    # The last two in the same arrays; forward, forward, backward, backward among them.
    for turn in ((0,), (1,), (0, 1), (1,), (0,)):
        given, results = {}, {}
        for which in turn:
            given[which] = shards[which]
            if len(calls) >= 4:
                given[which] = refilled
                for to, x in zip(refilled, shards[which]):
                    to[...] = x
            results[which] = plan.forward(*given[which][:3])
        for which in turn:
            q, k, v, dout = given[which]
            found = (*results[which], *plan.backward(dout, q, k, v, *results[which]))
            calls.append((which, dict(zip(NAMES, found)), [x.tobytes() for x in found]))
            if [x.tobytes() for x in given[which]] != bits[which]:
                bad.append(f"call {len(calls)} changed its arguments")
    for number, (which, found, kept) in enumerate(calls, 1):
        exact = sets[which][1]
        for (name, x), before in zip(found.items(), kept):
            error = distance(x, exact[name][plan.tokens])
            bad += [f"call {number}: {name} is off by {error:.1e}"] * (not error < 1e-11)
            bad += [f"{name} of call {number} was changed later"] * (x.tobytes() != before)
        first = next(y for w, _, y in calls if w == which)
        bad += [f"call {number} does not repeat"] * (kept != first)
    assert_all(comm, not bad, "; ".join(bad))
