"""Exchanges of tokens for heads among the U ranks of a Ulysses group, around attention.

Before attention a rank exchanges its tokens with all heads for all tokens of its Ulysses group
with 1/U of the heads.  After attention the results go back (DeepSpeed-Ulysses, arXiv:2309.14509).
If there are fewer KV heads than ranks, a KV head goes to all ranks that need it, and its gradients
are added up.  Each pair of ranks exchanges one message with all tensors: MPI's all-to-all does not
take device memory everywhere.

Slices of the heads are taken and put in the same way.  A single rank only copies them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from a2d_mpi.core.config import PHASES
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS_OF_KEYS, SUMS, PutHeads, Rows, TakeHeads


class Ulysses:
    """The Ulysses group of a rank, and the parcels (messages) of one kind of rows.

    Parcels before and after attention, forward and backward, share their buffers.
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
        self._parcels: dict[str, Rows] = {}

    def parcel(self, name: str, owner: int) -> Rows:
        """Declare an array with all rows of an owner, for one message; return its rows."""
        if name not in self._parcels:
            places = self.p.group.all_places(self.kind in KINDS_OF_KEYS, owner)
            options = {"accumulated": self.accumulated, "parcel": True}
            options["memory"] = f"parcel {name} {self._number}"
            array = self.p.array(f"{name} {self.kind}", self.kind, [(owner, places)], **options)
            self._parcels[name] = self.p.rows(array)
        return self._parcels[name]

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


def _kinds(p: Program, first: bool, last: bool, together: str, *apart: str) -> tuple[str, ...]:
    """Return the kinds of rows to exchange; one kind if queries and keys are the same tokens.

    Slices that share KV heads take them once, and put their gradients once.
    """
    if first and last and p.group.problem.keys is None:
        return (together,)
    return apart


def _add(p: Program, step: TakeHeads | PutHeads) -> None:
    if step.source.runs:
        p.add(step)


def share(p: Program, backward: bool, first: bool, last: bool) -> None:
    """Write the exchange before attention: a rank receives its heads of all tokens."""
    kinds = ("qkvd", "qd", "kv") if backward else ("qkv", "q", "kv")
    for number, kind in enumerate(_kinds(p, first, last, *kinds)):
        if kind == "kv" and not first:
            continue
        ulysses = Ulysses(p, kind, number)
        own, group = p.own(f"own {kind}", kind, "given", all_heads=True), ulysses.together("group")
        p.results[kind] = p.rows(group)
        if not ulysses.peers:
            _add(p, TakeHeads(own, p.results[kind], p.rank))
            continue
        coming = [
            p.receive("head", peer, ulysses.parcel(f"in {i}", peer))
            for i, peer in enumerate(ulysses.peers, 1)
        ]
        for i, peer in enumerate(ulysses.peers, 1):
            leaving = ulysses.parcel(f"out {i}", p.rank)
            _add(p, TakeHeads(own, leaving, peer))
            p.send("head", peer, leaving)
        # This rank's own rows are copied in the same way, without a message.
        arrived = ulysses.parcel("in 0", p.rank)
        _add(p, TakeHeads(own, arrived, p.rank))
        p.copy(arrived, p.rows(group, p.rank))
        for i, peer in enumerate(ulysses.peers, 1):
            p.wait([coming[i - 1]])
            p.copy(ulysses.parcel(f"in {i}", peer), p.rows(group, peer))


def collect(p: Program, backward: bool, first: bool, last: bool) -> None:
    """Write the exchange after attention: a rank receives all heads of its tokens' results."""
    kinds = ("gradients", "dq", "dkv") if backward else ("out", "out")
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
        if sums:
            p.clear(own)
        coming = [
            p.receive("head", peer, ulysses.parcel(f"in {i}", p.rank))
            for i, peer in enumerate(ulysses.peers, 1)
        ]
        for i, peer in enumerate(ulysses.peers, 1):
            returned = ulysses.parcel(f"out {i}", peer)
            p.copy(p.rows(group, peer), returned)
            p.send("head", peer, returned)
        p.copy(p.rows(group, p.rank), ulysses.parcel("in 0", p.rank))
        # In the order of ranks, so that sums repeat bit for bit.
        for peer in sorted([p.rank, *ulysses.peers]):
            i = 0 if peer == p.rank else 1 + ulysses.peers.index(peer)
            if i:
                p.wait([coming[i - 1]])
            _add(p, PutHeads(ulysses.parcel(f"in {i}", p.rank), own, peer, sums))


@cache  # equal drafts have the same functions
def exchanges(
    phase: str, first: bool = True, last: bool = True
) -> tuple[Callable[[Program], None], Callable[[Program], None]]:
    """Return the functions that write the exchanges before and after attention.

    `first`, `last`: whether a slice is the first, and the last, of those that share KV heads.
    """
    options = {"backward": phase == PHASES[1], "first": first, "last": last}
    return partial(share, **options), partial(collect, **options)
