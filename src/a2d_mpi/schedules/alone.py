"""The programs of a context-parallel group of one rank: one kernel call writes the results."""

from __future__ import annotations

from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import SUMS


def forward(p: Program) -> None:
    """Write the forward pass of a rank."""
    q, kv = p.own("own q", "q", "given"), p.own("own kv", "kv", "given")
    out = p.own("out", "out", "result", accumulated=("lse",))
    p.attend(q, kv, out)
    p.results = {"out": out}


def backward(p: Program) -> None:
    """Write the backward pass of a rank."""
    q, kv = p.own("own qd", "qd", "given"), p.own("own kv", "kv", "given")
    accumulated = SUMS if p.group.shares_kv else ()  # other groups add to dk and dv
    dq, dkv = (p.own(x, x, "result", accumulated=accumulated) for x in ("dq", "dkv"))
    p.differentiate(q, kv, dq, dkv, fresh=True)
    p.results = {"dq": dq, "dkv": dkv}
