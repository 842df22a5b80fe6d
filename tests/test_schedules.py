"""A method is one file: a toy that is not in the package runs, and is counted, like the others."""

import pytest
from cases import checked
from helpers import assert_all

from a2d_mpi import Causal, ProcessGrid
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.schedules import METHODS, Method
from a2d_mpi.schedules.steps import Attend, Merge, Rows, Zero

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.multirank]


def post(s, kind):
    """Everyone's k and v to everyone, straight from their owners; returns the messages."""
    n = s.sizes.rows * s.sizes.cols
    peers = [(s.rank + i) % n for i in range(1, n)]
    s.channels["all"] = tuple(range(n))
    q = Rows(s.array(f"own {kind}", kind, (s.rank,), "given"), s.rank)
    k = Rows(s.array("own kv", "kv", (s.rank,), "given"), s.rank)
    coming = [s.receive("all", p, Rows(s.array(f"kv {i}", "kv"), p)) for i, p in enumerate(peers)]
    for p in peers:
        s.send("all", p, k)
    return q, k, coming


def forward(s):
    q, k, coming = post(s, "q")
    out = Rows(s.array("out", "out", (s.rank,), "result"), s.rank)
    s.add(Attend(q, k, out))
    for message in coming:
        s.wait([message])
        s.add(Attend(q, message.rows, out))
    s.results = {"out": out}


def backward(s):
    q, k, coming = post(s, "qd")
    dq = Rows(s.array("dq", "dq", (s.rank,)), s.rank)
    dkv = Rows(s.array("dkv", "dkv"), s.rank)
    back = [
        s.receive("all", m.peer, Rows(s.array(f"dkv from {i}", "dkv"), s.rank))
        for i, m in enumerate(coming)
    ]
    s.add(Zero(dq), Zero(dkv), Attend(q, k, dq, dkv))
    for i, message in enumerate(coming):
        theirs = Rows(s.array(f"dkv to {i}", "dkv"), message.peer)
        s.wait([message])
        s.add(Zero(theirs), Attend(q, message.rows, dq, theirs))
        s.send("all", message.peer, theirs)
    for message in back:
        s.wait([message])
        s.add(Merge(message.rows, dkv))
    s.results = {"dq": dq, "dkv": dkv}


class Toy(AttentionPlan):
    method = "toy"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("nheads_kv, seqlen", [(6, 61), (1, 3)])
def test_toy_method(comm, monkeypatch, overlap, nheads_kv, seqlen):
    """Results against float64; bytes, messages and buffers against what its schedule says."""
    shape = lambda layout: (layout.rows, layout.cols, "")  # noqa: E731
    monkeypatch.setitem(METHODS, "toy", Method(forward, backward, shape))
    grid = ProcessGrid(comm, 1, comm.size)
    sizes = {"seqlen": seqlen, "nheads": 6, "nheads_kv": nheads_kv, "headdim": 7}
    plan = Toy(grid, Causal(), overlap=overlap, **sizes)
    _, bad = checked(plan)
    assert_all(comm, not bad, "; ".join(bad))
    received = sum(x[1] for key, x in plan.traffic.bytes.items() if key[0] == "forward")
    others = seqlen - len(plan.tokens)
    assert_all(comm, received == others * 2 * nheads_kv * 7 * 4, f"{received} bytes")
    grid.free()
