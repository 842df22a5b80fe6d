"""Tokens for heads: exchanges of the U ranks of a head group, before attention and after it.

Before it a rank has some tokens and all heads; then all tokens of its head group and 1/U of the
heads; after it the results go back (DeepSpeed-Ulysses, arXiv:2309.14509).  KV heads fewer than
ranks go to all ranks that need them, and their gradients come back as sums.  One message a rank,
all tensors together: MPI's all-to-all does not take device memory everywhere.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.schedules.steps import Copy, Merge, Ranks, Rows, Schedule, Zero


def _peers(s: Schedule) -> list[Ranks]:
    """The other ranks of the head group, nearest following first."""
    size = s.sizes.cols
    first = s.me - s.me % size
    s.channels["head"] = tuple(first + u for u in range(size))
    return [first + (s.me + u) % size for u in range(1, size)]


def share(s: Schedule, backward: bool) -> None:
    """Write down how rank ``s.me`` gets its heads of all tokens of the head group."""
    kind, peers = ("qkvd" if backward else "qkv"), _peers(s)
    own = Rows(s.array(f"own {kind}", kind, (s.me,), "given", all_heads=True), s.me)
    group = s.array(f"group {kind}", kind, s.channels["head"])
    coming = [
        s.receive("head", p, Rows(s.array(f"arriving {i}", kind, packed=True), p))
        for i, p in enumerate(peers, 1)
    ]
    for i, p in enumerate(peers, 1):
        leaving = Rows(s.array(f"leaving {i}", kind, packed=True), s.me)
        s.add(Copy(own._replace(heads=p), leaving))
        s.send("head", p, leaving)
    # This rank's own go the way of all others, without a message.
    arrived = Rows(s.array("arriving 0", kind, packed=True), s.me)
    s.add(Copy(own._replace(heads=s.me), arrived), Copy(arrived, Rows(group, s.me)))
    for message in coming:
        s.wait([message])
        s.add(Copy(message.rows, Rows(group, message.peer)))
    s.results = {kind: Rows(group)}


def collect(s: Schedule, backward: bool) -> None:
    """Write down how rank ``s.me`` gets all heads of the results for its tokens."""
    kind, peers = ("gradients" if backward else "out"), _peers(s)
    sums = ("dk", "dv") if backward and s.sizes.shares_kv else ()
    wide = ("lse", *sums)
    like = {"wide": wide, "packed": True}
    group = s.array(f"group {kind}", kind, s.channels["head"], "given")
    if s.sizes.narrow:  # they travel as the caller gets them, but for sums
        rounded = s.array(f"rounded {kind}", kind, s.channels["head"], wide=wide)
        s.add(Copy(Rows(group), Rows(rounded)))
        group = rounded
    own = Rows(s.array(kind, kind, (s.me,), "result", wide=wide, all_heads=True), s.me)
    coming = {
        i: s.receive("head", p, Rows(s.array(f"returning {i}", kind, **like), s.me))
        for i, p in enumerate(peers, 1)
    }
    for i, p in enumerate(peers, 1):
        returned = Rows(s.array(f"returned {i}", kind, **like), p)
        s.add(Copy(Rows(group, p), returned))
        s.send("head", p, returned)
    arrived = Rows(s.array("returning 0", kind, **like), s.me)
    s.add(Copy(Rows(group, s.me), arrived))
    if sums:
        s.add(Zero(own))
    # In the order of ranks: sums repeat bit for bit.
    first = int(np.ravel(s.me)[0])
    for i in sorted(range(len(peers) + 1), key=lambda i: (first + i) % (len(peers) + 1)):
        rows, owner = (coming[i].rows, coming[i].peer) if i else (arrived, s.me)
        s.wait([coming[i]] if i else [])
        s.add((Merge if sums else Copy)(rows, own._replace(heads=owner)))
    s.results = {kind: own}
