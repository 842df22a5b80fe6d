"""A method is one file: that of docs/adding-a-method.md runs, and is counted, like the others."""

import pytest
from cases import checked
from helpers import assert_all
from test_readme import blocks

from a2d_mpi import Causal, Full
from a2d_mpi.schedules import METHODS

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.multirank]


@pytest.fixture
def plan_of():
    """The class of the guide's plans; its method is registered meanwhile."""
    names, guide = set(METHODS), {"__name__": "guide"}
    exec("\n".join(blocks("docs/adding-a-method.md", "python")), guide)
    yield guide["GatherAttention"]
    for name in set(METHODS) - names:
        del METHODS[name]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("nheads_kv, seqlen", [(6, 61), (1, 3)])
def test_method_of_the_guide(comm, grid_of, plan_of, overlap, nheads_kv, seqlen):
    """Results against float64; bytes, messages and buffers against what its schedule says."""
    grid = grid_of(2 - comm.size % 2, comm.size // (2 - comm.size % 2))
    sizes = {"seqlen": seqlen, "nheads": 6, "nheads_kv": nheads_kv, "headdim": 7}
    for mask in (Causal(), Full()):
        plan = plan_of(grid, mask, overlap=overlap, **sizes)
        _, bad = checked(plan)
        assert_all(comm, not bad, "; ".join(bad))
    received = sum(x[1] for key, x in plan.traffic.bytes.items() if key[0] == "forward")
    others = seqlen - len(plan.tokens)
    assert_all(comm, received == others * 2 * nheads_kv * 7 * 4, f"{received} bytes")
