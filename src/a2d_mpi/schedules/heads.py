"""Exchanges of tokens for heads among the U ranks of a Ulysses group, around attention.

Before attention a rank exchanges its tokens with all heads for all tokens of its Ulysses group
with 1/U of the heads.  After attention the results go back (DeepSpeed-Ulysses, arXiv:2309.14509).
If there are fewer KV heads than ranks, a KV head goes to all ranks that need it, and its gradients
are added up.  Each pair of ranks exchanges one message with all tensors: MPI's all-to-all does not
take device memory everywhere.  All messages are posted before the first wait.

Slices of the heads are taken and put in the same way.  A single rank only copies them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from a2d_mpi.core.config import PHASES
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS_OF_KEYS, SUMS, PutHeads, Receive, Rows, TakeHeads


class Ulysses:
    """The exchange of one kind of rows among the Ulysses group of a rank.

    Parcels (messages) before and after attention, forward and backward, share their buffers.
    """

    def __init__(
        self, p: Program, kind: str, number: int, accumulated: tuple[str, ...] = SUMS
    ) -> None:
        self.p, self.kind, self.accumulated = p, kind, accumulated
        self._number = number
        size = p.group.cols
        p.channels["head"] = tuple(range(size))
        # Every rank begins with the next rank.
        self.peers = [(p.rank + u) % size for u in range(1, size)]
        self._coming: dict[int, Receive | None] = {}

    def parcel(self, name: str, owner: int) -> Rows:
        """Declare an array with all rows of an owner, for one message; return its rows."""
        places = self.p.group.all_places(self.kind in KINDS_OF_KEYS, owner)
        options = {"accumulated": self.accumulated, "parcel": True}
        options["memory"] = f"parcel {name} {self._number}"
        array = self.p.array(f"{name} {self.kind}", self.kind, [(owner, places)], **options)
        return self.p.rows(array)

    def together(
        self, name: str, role: str = "buffer", accumulated: tuple[str, ...] | None = None
    ) -> str:
        """Declare an array with all rows of the Ulysses group, by token; return its name."""
        p, memory = self.p, f"{name} {self._number}"
        of_keys = self.kind in KINDS_OF_KEYS
        pieces = [(x, p.group.all_places(of_keys, x)) for x in p.channels["head"]]
        accumulated = self.accumulated if accumulated is None else accumulated
        options = {"by_token": True, "memory": memory}
        return p.array(f"{name} {self.kind}", self.kind, pieces, role, accumulated, **options)

    def receive(self, owner: int | None = None) -> None:
        """Post the receives, of rows of an owner; by default each peer sends rows of its own."""
        for i, peer in enumerate(self.peers, 1):
            rows = self.parcel(f"in {i}", peer if owner is None else owner)
            self._coming[peer] = self.p.receive("head", peer, rows)

    def arrived(self, peer: int, owner: int) -> Rows:
        """Wait for the rows from a peer; a rank gets its own rows without a message."""
        if peer == self.p.rank:
            return self.parcel("in 0", owner)
        self.p.wait([self._coming[peer]])
        return self.parcel(f"in {1 + self.peers.index(peer)}", owner)


def _kinds(p: Program, first: bool, last: bool, together: str, *apart: str) -> tuple[str, ...]:
    """Return the kinds of rows to exchange; one kind if queries and keys are the same tokens.

    Slices that share KV heads take them once, and put their gradients once.
    """
    if first and last and p.group.problem.other_keys is None:
        return (together,)
    return apart


def _add(p: Program, step: TakeHeads | PutHeads) -> None:
    if step.source.runs:
        p.add(step)


def share(p: Program, backward: bool, first: bool, last: bool) -> None:
    """Write the exchange before attention: a rank receives its heads of all tokens."""
    kinds = ("qkvd", "qd", "kv") if backward else ("qkv", "q", "kv")
    exchanges = []
    for number, kind in enumerate(_kinds(p, first, last, *kinds)):
        if kind == "kv" and not first:
            continue
        ulysses = Ulysses(p, kind, number)
        own, group = p.own(f"own {kind}", kind, "given", all_heads=True), ulysses.together("group")
        p.results[kind] = p.rows(group)
        if not ulysses.peers:
            _add(p, TakeHeads(own, p.results[kind], p.rank))
            continue
        exchanges.append((ulysses, group))
        ulysses.receive()
        for i, peer in enumerate(ulysses.peers, 1):
            leaving = ulysses.parcel(f"out {i}", p.rank)
            _add(p, TakeHeads(own, leaving, peer))
            p.send("head", peer, leaving)
        _add(p, TakeHeads(own, ulysses.parcel("in 0", p.rank), p.rank))
    for ulysses, group in exchanges:
        for peer in (p.rank, *ulysses.peers):
            p.copy(ulysses.arrived(peer, peer), p.rows(group, peer))


def collect(p: Program, backward: bool, first: bool, last: bool) -> None:
    """Write the exchange after attention: a rank receives all heads of its tokens' results."""
    kinds = ("gradients", "dq", "dkv") if backward else ("out", "out")
    exchanges = []
    for number, kind in enumerate(_kinds(p, first, last, *kinds)):
        if kind == "dkv" and not last:
            continue
        sums = ("dk", "dv") if kind in ("gradients", "dkv") and p.group.shares_kv else ()
        ulysses = Ulysses(p, kind, number, ("lse", *sums))
        group = ulysses.together("group", "given", SUMS)
        if p.group.config.mixed_precision:  # results travel in the storage dtype, except sums
            rounded = ulysses.together("rounded")
            p.copy(p.rows(group), p.rows(rounded))
            group = rounded
        own = p.own(f"own {kind}", kind, "result", accumulated=ulysses.accumulated, all_heads=True)
        p.results[kind] = own
        if not ulysses.peers:
            _add(p, PutHeads(p.rows(group), own, p.rank, ()))
            continue
        exchanges.append((ulysses, own, sums))
        if sums:
            p.clear(own)
        ulysses.receive(p.rank)
        for i, peer in enumerate(ulysses.peers, 1):
            returned = ulysses.parcel(f"out {i}", peer)
            p.copy(p.rows(group, peer), returned)
            p.send("head", peer, returned)
        p.copy(p.rows(group, p.rank), ulysses.parcel("in 0", p.rank))
    for ulysses, own, sums in exchanges:
        for peer in sorted([p.rank, *ulysses.peers]):  # so that sums repeat bit for bit
            _add(p, PutHeads(ulysses.arrived(peer, p.rank), own, peer, sums))


@cache  # equal drafts have the same functions
def exchanges(
    phase: str, first: bool = True, last: bool = True
) -> tuple[Callable[[Program], None], Callable[[Program], None]]:
    """Return the functions that write the exchanges before and after attention.

    `first`, `last`: whether a slice is the first, and the last, of those that share KV heads.
    """
    options = {"backward": phase == PHASES[1], "first": first, "last": last}
    return partial(share, **options), partial(collect, **options)
