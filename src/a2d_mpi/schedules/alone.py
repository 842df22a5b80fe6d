"""A context group of one rank: one kernel call, which writes results as the caller gets them."""

from __future__ import annotations

from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.steps import WIDE, Attend, Rows


def forward(s: Schedule) -> None:
    """Write down the forward pass of rank ``s.rank``."""
    q, kv = (Rows(s.array(f"own {x}", x, (s.rank,), "given"), s.rank) for x in ("q", "kv"))
    out = Rows(s.array("out", "out", (s.rank,), "result", wide=("lse",)), s.rank)
    s.add(Attend(q, kv, out))
    s.results = {"out": out}


def backward(s: Schedule) -> None:
    """Write down the backward pass of rank ``s.rank``."""
    q, kv = (Rows(s.array(f"own {x}", x, (s.rank,), "given"), s.rank) for x in ("qd", "kv"))
    wide = WIDE if s.sizes.shares_kv else ()  # other context groups add to them
    dq, dkv = (Rows(s.array(x, x, (s.rank,), "result", wide=wide), s.rank) for x in ("dq", "dkv"))
    s.add(Attend(q, kv, dq, dkv, fresh=True))
    s.results = {"dq": dq, "dkv": dkv}
