"""A method is one file: that of docs/extending.md runs, and is counted, like the others."""

import pytest
from cases import checked
from helpers import assert_all, blocks

from a2d_mpi import Causal, Full
from a2d_mpi.attention.methods import plan_class
from a2d_mpi.schedules import METHODS, Method
from a2d_mpi.schedules.steps import Rows

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.multirank]


@pytest.fixture
def plan_of():
    """Register the guide's method, and return the class of its plans."""
    names, guide = set(METHODS), {"__name__": "guide"}
    exec("\n".join(blocks("docs/extending.md", "python")[:3]), guide)
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


def piece_by_piece(p, name):
    """All rows of an array of two owners, one run per owner."""
    return p.rows(name)._replace(runs=p.rows(name, 1).runs + p.rows(name, 0).runs)


@pytest.mark.parametrize(
    ("owners", "told"),
    [
        ((0, 2), "one run of rows, got 2 runs of 'all kv'"),
        ((2, 0), "consecutive keys of 'all kv' in the order of tokens"),
    ],
)
def test_calls_that_no_kernel_can_take(comm, grid_of, monkeypatch, owners, told):
    """A plan refuses keys that are no run of memory and no run of tokens, and no rank hangs."""

    def write(p):
        q, out = p.own("own q", "q", "given"), p.own("out", "out", "result")
        pieces = [(owner, p.group.all_places(True, owner)) for owner in (2, 1, 0)]
        array = p.array("all kv", "kv", pieces)
        p.attend(q, Rows(array, tuple(y for x in owners for y in p.rows(array, x).runs)), out)

    bad = Method(write, write, lambda layout: (1, layout.positions))
    monkeypatch.setitem(METHODS, "bad", bad)
    with pytest.raises(ValueError, match=told):
        plan_class("bad")(grid_of(1, comm.size), Full(), seqlen=61, nheads=2, headdim=4)
