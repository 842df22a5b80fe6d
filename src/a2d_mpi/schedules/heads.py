"""Exchanges of tokens for heads among the U ranks of a Ulysses group, around attention.

Before attention a rank exchanges its tokens with all heads for all tokens of its Ulysses group
with 1/U of the heads.  After attention the results go back (DeepSpeed-Ulysses, arXiv:2309.14509).
If there are fewer KV heads than ranks, a KV head goes to all ranks that need it, and its gradients
are added up.  Each pair of ranks exchanges one message with all tensors: MPI's all-to-all does not
take device memory everywhere.  All messages are posted before the first wait.

Slices of the heads are taken and put in the same way.  A single rank only copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.core.sizes import next_ranks
from a2d_mpi.schedules.group import Group
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import KINDS_OF_KEYS, SUMS, PutHeads, Receive, Rows, TakeHeads
from a2d_mpi.sharding.distribution import Distribution
from a2d_mpi.sharding.progressions import ranks_among


def ulysses_groups(
    problem: Problem, config: AttentionConfig, size: int, shares_kv: bool
) -> Callable[[int], Group]:
    """Return a function from a grid position to the group of its `size` ranks.

    Parameters
    ----------
    problem : Problem
        The problem of all ranks of the layout, with all heads.
    config, size, shares_kv
        As of the `Group`.
    """

    @cache
    def at(position: int) -> Group:
        """Return the group: its ranks' tokens, numbered from 0, and no mask."""
        owners = range(position * size, (position + 1) * size)
        queries = keys = _among(problem.queries, owners)
        if problem.keys != problem.queries:
            keys = _among(problem.keys, owners)
        return Group(1, size, Problem(problem.config, queries, keys), config, shares_kv)

    return at


def _among(shards: Distribution, owners: range) -> Distribution:
    """Return the shards of `owners` as a distribution of their tokens, numbered from 0."""
    listed = ranks_among([[r for r in shards.runs(p) if r] for p in owners])
    tokens = sum(len(r) for runs in listed for r in runs)
    return Distribution("balanced", tokens, len(owners), listed=tuple(map(tuple, listed)))


class Ulysses:
    """The exchange of one kind of rows among the Ulysses group of a rank.

    Parcels (messages) before and after attention, forward and backward, share their buffers.
    """

    def __init__(self, p: Program, kind: str, number: int, accumulated: tuple = SUMS) -> None:
        self.p, self.kind, self._number, self.accumulated = p, kind, number, accumulated
        size = p.group.cols
        p.channels["head"] = tuple(range(size))
        self.peers = next_ranks(p.rank, size)
        self._coming: dict[int, tuple[Rows, Receive | None]] = {}

    def array(self, name: str, owners: Iterable[int], accumulated: tuple, **options: Any) -> str:
        """Declare an array with all rows of ranks of the Ulysses group; return its name."""
        of_keys = self.kind in KINDS_OF_KEYS
        pieces = [(x, self.p.group.all_places(of_keys, x)) for x in owners]
        options |= {"accumulated": accumulated, "memory": f"{name} {self._number}"}
        return self.p.array(f"{name} {self.kind}", self.kind, pieces, **options)

    def parcel(self, name: str, owner: int) -> Rows:
        """Declare an array with all rows of an owner, for one message; return its rows."""
        return self.p.rows(self.array(name, [owner], self.accumulated, parcel=True))

    def receive(self, owner: int | None = None) -> None:
        """Post the receives, of rows of an owner; by default each peer sends rows of its own."""
        for i, peer in enumerate((self.p.rank, *self.peers)):
            rows = self.parcel(f"in {i}", peer if owner is None else owner)
            # A rank gets its own rows without a message.
            self._coming[peer] = rows, self.p.receive("head", peer, rows) if i else None

    def arrived(self, peer: int) -> Rows:
        """Wait for the rows from a peer."""
        rows, message = self._coming[peer]
        self.p.wait([message])
        return rows


def _kinds(p: Program, together: str, *apart: str) -> tuple[str, ...]:
    """Return the kinds of rows to exchange; one kind if queries and keys are the same tokens."""
    return (together,) if p.group.problem.keys == p.group.problem.queries else apart


def share(p: Program, kinds: tuple[str, ...]) -> None:
    """Write the exchange before attention: a rank receives its heads of all tokens."""
    exchanges = []
    for number, kind in enumerate(_kinds(p, *kinds)):
        ulysses = Ulysses(p, kind, number)
        own, group = (
            p.own(f"own {kind}", kind, "given", all_heads=True),
            ulysses.array("group", p.channels["head"], SUMS, by_token=True),
        )
        p.results[kind] = p.rows(group)
        if not ulysses.peers:
            p.add(TakeHeads(own, p.results[kind], p.rank))
            continue
        exchanges.append((ulysses, group))
        ulysses.receive()
        for i, peer in enumerate(ulysses.peers, 1):
            leaving = ulysses.parcel(f"out {i}", p.rank)
            p.add(TakeHeads(own, leaving, peer))
            p.send("head", peer, leaving)
        p.add(TakeHeads(own, ulysses.parcel("in 0", p.rank), p.rank))
    for ulysses, group in exchanges:
        for peer in (p.rank, *ulysses.peers):
            p.copy(ulysses.arrived(peer), p.rows(group, peer))


def collect(p: Program, kinds: tuple[str, ...]) -> None:
    """Write the exchange after attention: a rank receives all heads of its tokens' results."""
    exchanges = []
    for number, kind in enumerate(_kinds(p, *kinds)):
        sums = ("dk", "dv") if kind in ("gradients", "dkv") and p.group.shares_kv else ()
        ulysses = Ulysses(p, kind, number, ("lse", *sums))
        everyone = p.channels["head"]
        group = ulysses.array("group", everyone, SUMS, by_token=True, role="given")
        if p.group.config.mixed_precision:  # results travel in the storage dtype, except sums
            rounded = ulysses.array("rounded", everyone, ulysses.accumulated, by_token=True)
            p.copy(p.rows(group), p.rows(rounded))
            group = rounded
        own = p.own(f"own {kind}", kind, "result", accumulated=ulysses.accumulated, all_heads=True)
        p.results[kind] = own
        if not ulysses.peers:
            p.add(PutHeads(p.rows(group), own, p.rank, ()))
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
            p.add(PutHeads(ulysses.arrived(peer), own, peer, sums))


# The functions that write the exchanges before and after attention, by phase.
EXCHANGES = {
    "forward": (partial(share, kinds=("qkv", "q", "kv")), partial(collect, kinds=("out", "out"))),
    "backward": (
        partial(share, kinds=("qkvd", "qd", "kv")),
        partial(collect, kinds=("gradients", "dq", "dkv")),
    ),
}
