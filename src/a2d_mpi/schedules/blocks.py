"""Blocks of tokens placed by an optimiser: any mask, any number of ranks.

The tokens are cut into blocks.  Each block has an owner.  Each pair of a block of queries and a
block of keys with a visible pair is computed by one rank (`a2d_mpi.sharding.placement`).  The rank
receives the queries and keys of its pairs directly from their owners, computes its pairs, and
sends partial results directly back.  Only rows that its pairs require travel.

Source: DCP (Jiang et al., "DCP: Addressing Input Dynamism In Long-Context Training via Dynamic
Context Parallelism", SOSP 2025, arXiv:2510.10620) places blocks of data and of computation in this
way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from a2d_mpi.masks.intervals import Runs, joined
from a2d_mpi.masks.mask import Mask
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.program import Program
from a2d_mpi.schedules.steps import Receive, Rows
from a2d_mpi.sharding.assigned import Assigned

if TYPE_CHECKING:
    from a2d_mpi.sharding.assignment import Assignment


@lru_cache(maxsize=16)
def placed(mask: Mask, seqlen: int, ranks: int, kv_share: float) -> Assignment:
    """Place the blocks of a sequence, see `a2d_mpi.sharding.placement.place`; cached."""
    from a2d_mpi.sharding.placement import place

    return place(mask, seqlen, ranks, kv_share=kv_share)


class Needs:
    """Tokens of every owner that the pairs of every rank need.

    Parameters
    ----------
    problem : Problem
        The problem of the context-parallel group.
    """

    def __init__(self, problem: Problem) -> None:
        config, self._shards = problem.config, problem.shards
        if self._shards.name != "blocks":
            raise ValueError(
                f"the method blocks needs the distribution blocks, got {self._shards.name}"
            )
        share = config.nheads_kv / config.nheads
        self.placement = placed(problem.mask, config.seqlen, self._shards.nshards, share)
        self._mask, self._places = problem.mask, {}
        self._assigned: dict[int, Assigned] = {}

    def digest(self) -> str:
        """Return a short hash of the placement."""
        placement, demand = self.placement, self.placement.demand
        digest = hashlib.sha256()
        for array in (demand.bounds, placement.owner, demand.pairs, placement.rank):
            digest.update(np.ascontiguousarray(array, np.int64))
        return digest.hexdigest()[:12]

    def assigned(self, rank: int) -> Assigned:
        """Return the mask of the pairs that a rank computes."""
        if rank not in self._assigned:
            demand = self.placement.demand
            pairs = demand.pairs[self.placement.rank == rank]
            self._assigned[rank] = Assigned(self._mask, demand.bounds, pairs)
        return self._assigned[rank]

    def of(self, of_keys: bool, owner: int, rank: int) -> Runs:
        """Return the places in the owner's shard of the tokens that a rank needs."""
        key = of_keys, owner, rank
        if key not in self._places:
            placement, mask, demand = self.placement, self.assigned(rank), self.placement.demand
            pairs = demand.pairs[placement.rank == rank]
            own = placement.owner[pairs[:, int(of_keys)]] == owner
            tokens: list[tuple[int, int]] = []
            for block in np.unique(pairs[own, int(of_keys)]).tolist():
                first, last = demand.bounds[block : block + 2].tolist()
                tokens += mask.required(of_keys, first, last, pairs)
            self._places[key] = self._shards.places(owner, joined(tokens))
        return self._places[key]


@lru_cache(maxsize=4)
def needs_of(problem: Problem) -> Needs:
    """Return the needs of all ranks; they are cached for the programs of all ranks."""
    return Needs(problem)


class RankBlocks:
    """The blocks that a rank computes with: rows that it receives and sends, and kernel calls."""

    def __init__(self, p: Program, backward: bool) -> None:
        self.p, n = p, p.group.problem.shards.nshards
        self.gathers_first = p.group.gathers_first(backward)
        kind = "qd" if backward else "q"
        self.needs = needs_of(p.group.problem)
        p.mask = self.needs.assigned(p.rank)
        p.channels["all"] = tuple(range(n))
        self.peers = [(p.rank + i) % n for i in range(1, n)]
        self.own_q, self.own_k = (
            p.own(f"own {kind}", kind, "given"),
            p.own("own kv", "kv", "given"),
        )
        # All keys of this rank, and the keys of others that it needs, in the order of ranks.
        owners = sorted([p.rank, *(x for x in self.peers if self._wanted(True, x))])
        own_places = p.group.all_places(True, p.rank)
        pieces = [(x, own_places if x == p.rank else self._wanted(True, x)) for x in owners]
        self.keys = p.array("all kv", "kv", pieces)
        self.k_coming = {
            x: p.receive("all", x, p.rows(self.keys, x)) for x in self.peers if x in owners
        }
        self.q_coming = {
            x: p.receive("all", x, self.of_owner(kind, "from", x))
            for x in self.peers
            if self._wanted(False, x)
        }
        for of_keys, own in ((True, self.own_k), (False, self.own_q)):  # keys are needed first
            for x in reversed(self.peers):
                p.send("all", x, p.rows(own.array, p.rank, self.given(of_keys, x)))
        p.copy(self.own_k, p.rows(self.keys, p.rank))
        if not p.group.overlap:
            p.wait([*self.k_coming.values(), *self.q_coming.values()])

    def _wanted(self, of_keys: bool, owner: int) -> Runs:
        return self.needs.of(of_keys, owner, self.p.rank)

    def given(self, of_keys: bool, peer: int) -> Runs:
        """Return the places of this rank's tokens that a peer needs."""
        return self.needs.of(of_keys, self.p.rank, peer)

    def of_owner(self, kind: str, way: str, owner: int) -> Rows:
        """Declare rows for the queries of an owner that this rank computes with."""
        pieces = [(owner, self._wanted(False, owner))]
        return self.p.rows(self.p.array(f"{kind} {way} {owner}", kind, pieces))

    def calls(self) -> Iterator[tuple[int, Rows, Rows]]:
        """Yield the owner of the queries, queries and keys of each call; own queries first."""
        p = self.p
        yield p.rank, self.own_q, p.rows(self.keys, p.rank)
        for message in self.k_coming.values():
            if p.group.overlap:
                p.wait([message])
            yield p.rank, self.own_q, message.rows
        if self.gathers_first:
            if p.group.overlap:
                p.wait(self.q_coming.values())
            p.gathered("all")
        for owner, message in self.q_coming.items():
            if p.group.overlap and not self.gathers_first:
                p.wait([message])
            yield owner, message.rows, p.rows(p.sorted(self.keys))

    def partials(self, kind: str) -> list[tuple[Receive, Runs]]:
        """Post the receives of partial results that other ranks compute for this rank's tokens.

        Return each message with the places of its tokens in this rank's shard.
        """
        p, coming = self.p, []
        for x in self.peers:
            if places := self.given(kind == "dkv", x):
                name = p.array(f"{kind} back from {x}", kind, [(p.rank, places)])
                coming.append((p.receive("all", x, p.rows(name)), places))
        return coming

    def collect(self, coming: list[tuple[Receive, Runs]], target: str) -> None:
        """Merge the messages of `partials` into this rank's own results."""
        for message, places in coming:
            self.p.wait([message])
            self.p.combine(message.rows, self.p.rows(target, self.p.rank, places))


def forward(p: Program) -> None:
    """Write the forward pass of a rank."""
    blocks = RankBlocks(p, backward=False)
    out = p.own("out", "out", "result")
    coming = blocks.partials("out")
    for owner, queries, keys in blocks.calls():
        if owner == p.rank:
            p.attend(queries, keys, out)
        else:
            partial = blocks.of_owner("out", "to", owner)
            p.attend(queries, keys, partial)
            p.give("all", owner, partial)
    p.release("all")
    blocks.collect(coming, out.array)
    p.results = {"out": out}


def backward(p: Program) -> None:
    """Write the backward pass of a rank."""
    blocks = RankBlocks(p, backward=True)
    dq = p.own("dq", "dq")
    p.clear(dq)
    dkv = p.sums("all dkv", "dkv", blocks.keys, by_token=bool(blocks.q_coming))
    dq_coming, dkv_coming = blocks.partials("dq"), blocks.partials("dkv")
    for owner, queries, keys in blocks.calls():
        into = dq
        if owner != p.rank:
            into = blocks.of_owner("dq", "to", owner)
            p.clear(into)
        p.differentiate(queries, keys, into, dkv(keys))
        if owner != p.rank:
            p.give("all", owner, into)
    for peer in blocks.k_coming:
        p.give("all", peer, p.rows("all dkv", peer))
    p.release("all")
    blocks.collect(dq_coming, "dq")
    blocks.collect(dkv_coming, "all dkv")
    p.results = {"dq": dq, "dkv": p.rows("all dkv", p.rank)}


METHOD = Method(
    forward,
    backward,
    shape=lambda layout: (1, layout.positions, ""),
    distribution="blocks",
    suits=lambda layout: layout.cols == 1 < layout.rows,
    place=lambda *sizes: placed(*sizes).runs(),
    digest=lambda problem: needs_of(problem).digest(),
    cuts=lambda problem: needs_of(problem).placement.demand.bounds,
)
