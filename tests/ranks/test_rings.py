"""Rings and double rings: equal cases, and messages in flight."""

import pytest
from cases import NHEADS, differing
from dense import problem_for, results_of, wrong_with
from helpers import assert_all

from a2d_mpi import Causal, DoubleRingAttention, ProcessGrid, RingAttention
from a2d_mpi.comm.channel import Channel

pytestmark = pytest.mark.mpi

SIZES = {"seqlen": 130, "nheads": NHEADS, "headdim": 16}


@pytest.fixture
def flights(monkeypatch):
    """Return the (direction, peer, tag) of two messages in flight at the same time."""
    flying, twice = {}, []

    def start(method, direction):
        def begin(self, tensors, peer, tag):
            requests = method(self, tensors, peer, tag)
            key = (direction, peer, tag)
            if flying.get(key):
                twice.append(key)
            flying[key] = list(requests)
            return requests

        return begin

    def wait(self, messages):
        done = {id(x) for x in messages}
        original(self, messages)
        for key, requests in flying.items():
            flying[key] = [x for x in requests if id(x) not in done]

    original = Channel.wait
    monkeypatch.setattr(Channel, "isend", start(Channel.isend, "send"))
    monkeypatch.setattr(Channel, "irecv", start(Channel.irecv, "receive"))
    monkeypatch.setattr(Channel, "wait", wait)
    yield twice
    assert not any(flying.values())  # all were waited for


def grids(comm):
    """Yield grids of all shapes."""
    for cols in (n for n in range(1, comm.size + 1) if comm.size % n == 0):
        grid = ProcessGrid(comm, comm.size // cols, cols)
        yield grid
        grid.free()


@pytest.mark.parametrize("seqlen", [3, 130])
def test_every_shape(comm, flights, seqlen):
    """Results are right, and at most one message of a tag is in flight between ranks."""
    bad = []
    for grid in grids(comm):
        plan = DoubleRingAttention(grid, Causal(), **{**SIZES, "seqlen": seqlen})
        bad += wrong_with(plan)
        names = {name for _, name in plan.traffic.bytes}
        single = 1 in (grid.rows, grid.cols)  # all ranks form one ring
        hops = ({"ring"} if single else {"inner", "outer"}) if comm.size > 1 else set()
        if seqlen == 130 and names != hops:
            bad.append(f"{grid}: messages on {names}")
    bad += [f"two on their way: {x}" for x in flights]
    assert_all(comm, not bad, "; ".join(bad))


def test_single_rings(comm):
    """With one group, or groups of one rank, the double ring is the ring, bit for bit."""
    bad = []
    for grid in grids(comm):
        if 1 not in (grid.rows, grid.cols):
            continue
        ring = RingAttention(grid, Causal(), **SIZES)
        given = problem_for(ring)
        expected = results_of(ring, given)
        plan = DoubleRingAttention(grid, Causal(), **SIZES)
        bad += [f"{grid}: {x}" for x in differing(expected, results_of(plan, given))]
        for counted in ("bytes", "messages"):
            a, b = (list(getattr(p.traffic, counted).values()) for p in (ring, plan))
            if a != b:
                bad.append(f"{counted} on {grid}: {b}, the ring {a}")
    assert_all(comm, not bad, "; ".join(bad))
