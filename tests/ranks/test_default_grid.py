"""The default grid of drivers is the one whose ranks receive the fewest bytes, as counted."""

import pytest
from cases import SIZE
from dense import problem_for, results_of
from helpers import assert_all

from a2d_mpi import Attention2D, Causal, Full, SlidingWindow
from a2d_mpi.cli.run import least_bytes
from a2d_mpi.planning.workload import Workload

pytestmark = [pytest.mark.mpi, pytest.mark.one_mpi]
SIZES = {"seqlen": 97, "headdim": 8, "dtype": "float64", "nheads": 8}


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(9)], ids=str)
@pytest.mark.parametrize("nheads_kv", [1, 2, 8])
def test_fewest_bytes(comm, grid_of, mask, nheads_kv):
    sizes, received = {**SIZES, "nheads_kv": nheads_kv}, {}
    shapes = [(x, SIZE // x) for x in range(1, SIZE + 1) if SIZE % x == 0]
    for shape in shapes:
        plan = Attention2D(grid_of(*shape), mask, **sizes)
        results_of(plan, problem_for(plan))
        received[shape] = comm.allreduce(sum(x for _, x in plan.traffic.bytes.values()), op=max)
        plan.free()
    work = Workload(**sizes, mask=mask, backward=True)
    found = least_bytes(comm, "attention2d", work)
    assert_all(comm, received[found] == min(received.values()), f"{found} of {received}")
    if nheads_kv == 1 and SIZE in (2, 3, 5):
        assert_all(comm, found == (SIZE, 1), "keys are cheaper")


def test_rings(comm):
    """A ring is a grid of one column."""
    found = least_bytes(comm, "ring", Workload(**SIZES, mask=Causal()))
    assert_all(comm, found == (SIZE, 1), str(found))
