"""A method is one file: a toy that is not in the package runs, and is counted, like the others."""

import pytest
from cases import checked
from helpers import assert_all

from a2d_mpi import Causal, ProcessGrid
from a2d_mpi.attention.plan import AttentionPlan
from a2d_mpi.schedules import METHODS, Method

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.multirank]


def post(p, kind):
    """Everyone's k and v to everyone, straight from their owners; returns the messages."""
    n = p.group.rows * p.group.cols
    peers = [(p.rank + i) % n for i in range(1, n)]
    p.channels["all"] = tuple(range(n))
    q, k = p.own(f"own {kind}", kind, "given"), p.own("own kv", "kv", "given")
    coming = {}
    for peer in peers:
        kv = p.array(f"kv of {peer}", "kv", [(peer, p.group.whole(True, peer))])
        coming[peer] = p.receive("all", peer, p.rows(kv))
    for peer in peers:
        p.send("all", peer, k)
    return q, k, {peer: message for peer, message in coming.items() if message}


def forward(p):
    q, k, coming = post(p, "q")
    out = p.own("out", "out", "result")
    p.attend(q, k, out)
    for message in coming.values():
        p.wait([message])
        p.attend(q, message.rows, out)
    p.results = {"out": out}


def backward(p):
    q, k, coming = post(p, "qd")
    dq, dkv = p.own("dq", "dq"), p.own("dkv", "dkv")
    back = [
        p.receive("all", peer, p.own(f"dkv from {peer}", "dkv"))
        for peer in range(p.group.rows * p.group.cols)
        if peer != p.rank
    ]
    p.clear(dq)
    p.clear(dkv)
    p.differentiate(q, k, dq, dkv)
    for peer, message in coming.items():
        theirs = p.sums(f"dkv to {peer}", "dkv", f"kv of {peer}")(message.rows)
        p.wait([message])
        p.differentiate(q, message.rows, dq, theirs)
        p.send("all", peer, theirs)
    for message in back:
        if message:
            p.wait([message])
            p.combine(message.rows, dkv)
    p.results = {"dq": dq, "dkv": dkv}


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
