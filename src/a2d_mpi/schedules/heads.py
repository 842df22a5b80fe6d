"""Tokens for heads: exchanges of the U ranks of a head group, before attention and after it.

Before it a rank has some tokens and all heads; then all tokens of its head group and 1/U of the
heads; after it the results go back (DeepSpeed-Ulysses, arXiv:2309.14509).  KV heads fewer than
ranks go to all ranks that need them, and their gradients come back as sums.  One message a rank,
all tensors together: MPI's all-to-all does not take device memory everywhere.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.core.meetings import Ranks
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.steps import Copy, Merge, Rows, Zero


def _peers(s: Schedule) -> list[Ranks]:
    """The other ranks of the head group, nearest following first."""
    size = s.sizes.cols
    first = s.rank - s.rank % size
    s.channels["head"] = tuple(first + u for u in range(size))
    return [first + (s.rank + u) % size for u in range(1, size)]


def _kinds(s: Schedule, together: str, *apart: str) -> tuple[str, ...]:
    """Kinds of rows that are exchanged: all together if queries and keys are the same tokens."""
    return (together,) if s.sizes.problem.keys is None else apart


def share(s: Schedule, backward: bool) -> None:
    """Write down how rank ``s.rank`` gets its heads of all tokens of the head group."""
    peers, kinds = _peers(s), ("qkvd", "qd", "kv") if backward else ("qkv", "q", "kv")
    for kind in _kinds(s, *kinds):
        own = Rows(s.array(f"own {kind}", kind, (s.rank,), "given", all_heads=True), s.rank)
        group = s.array(f"group {kind}", kind, s.channels["head"], by_token=True)

        def parcel(name: str, owner: Ranks, kind: str = kind) -> Rows:
            return Rows(s.array(f"{name} {kind}", kind, packed=True), owner)

        coming = [s.receive("head", p, parcel(f"arriving {i}", p)) for i, p in enumerate(peers, 1)]
        for i, p in enumerate(peers, 1):
            leaving = parcel(f"leaving {i}", s.rank)
            s.add(Copy(own._replace(heads=p), leaving))
            s.send("head", p, leaving)
        # This rank's own go the way of all others, without a message.
        arrived = parcel("arriving 0", s.rank)
        s.add(Copy(own._replace(heads=s.rank), arrived), Copy(arrived, Rows(group, s.rank)))
        for message in coming:
            s.wait([message])
            s.add(Copy(message.rows, Rows(group, message.peer)))
        s.results[kind] = Rows(group)


def collect(s: Schedule, backward: bool) -> None:
    """Write down how rank ``s.rank`` gets all heads of the results for its tokens."""
    peers, kinds = _peers(s), ("gradients", "dq", "dkv") if backward else ("out", "out")
    for kind in _kinds(s, *kinds):
        sums = ("dk", "dv") if kind in ("gradients", "dkv") and s.sizes.shares_kv else ()
        wide = ("lse", *sums)
        group = s.array(f"group {kind}", kind, s.channels["head"], "given", by_token=True)
        if s.sizes.narrow:  # results travel as the caller gets them, but for sums
            name = f"rounded {kind}"
            rounded = s.array(name, kind, s.channels["head"], wide=wide, by_token=True)
            s.add(Copy(Rows(group), Rows(rounded)))
            group = rounded

        def parcel(name: str, owner: Ranks, kind: str = kind, wide: tuple = wide) -> Rows:
            return Rows(s.array(f"{name} {kind}", kind, wide=wide, packed=True), owner)

        own = s.array(f"own {kind}", kind, (s.rank,), "result", wide=wide, all_heads=True)
        own = Rows(own, s.rank)
        if sums:
            s.add(Zero(own))
        coming = [
            s.receive("head", p, parcel(f"returning {i}", s.rank)) for i, p in enumerate(peers, 1)
        ]
        for i, p in enumerate(peers, 1):
            returned = parcel(f"returned {i}", p)
            s.add(Copy(Rows(group, p), returned))
            s.send("head", p, returned)
        arrived = parcel("returning 0", s.rank)
        s.add(Copy(Rows(group, s.rank), arrived))
        # In the order of ranks: sums repeat bit for bit.
        size, first = len(peers) + 1, int(np.ravel(s.rank)[0])
        for i in sorted(range(size), key=lambda i: (first + i) % size):
            rows, owner = (coming[i - 1].rows, peers[i - 1]) if i else (arrived, s.rank)
            s.wait(coming[i - 1 : i])
            s.add((Merge if sums else Copy)(rows, own._replace(heads=owner)))
        s.results[kind] = own
