"""Blocks of tokens placed by an optimiser: any mask, any number of ranks.

The tokens are cut into blocks, each with an owner; each pair of a block of queries and a block of
keys in which a query sees a key has a rank that computes it (`a2d_mpi.core.placement`).  A rank
gets the queries and keys that its pairs need, straight from their owners, computes its pairs, and
sends partial results straight back.  What a rank needs of a block are the tokens that meet others
in its own pairs.

Source: DCP (Jiang et al., "DCP: Addressing Input Dynamism In Long-Context Training via Dynamic
Context Parallelism", SOSP 2025, arXiv:2510.10620) places blocks of data and of computation in this
way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from a2d_mpi.core.assigned import Assigned
from a2d_mpi.core.masks import Mask
from a2d_mpi.core.placement import Placement, place
from a2d_mpi.core.problem import Problem
from a2d_mpi.schedules.method import Method
from a2d_mpi.schedules.schedule import Schedule
from a2d_mpi.schedules.sizes import Chosen
from a2d_mpi.schedules.steps import Attend, Copy, Merge, Message, Rows, Zero


@lru_cache(maxsize=16)
def placed(mask: Mask, seqlen: int, ranks: int, kv_share: float) -> Placement:
    """Place the blocks of a sequence; see `a2d_mpi.core.placement.place`.  Remembered."""
    return place(mask, seqlen, ranks, kv_share=kv_share)


class Needs:
    """Tokens of every owner that the pairs of every rank need.

    Parameters
    ----------
    problem : Problem
        Of the context group.
    """

    def __init__(self, problem: Problem) -> None:
        config, self._shards = problem.config, problem.shards
        if self._shards.name != "blocks":
            raise ValueError(f"blocks have no {self._shards.name} distribution")
        share = config.nheads_kv / config.nheads
        self.placement = placed(problem.mask, config.seqlen, self._shards.nshards, share)
        self._mask, self._found = problem.mask, {}
        self._assigned: dict[int, Assigned] = {}

    def digest(self) -> str:
        """Short text that follows from the placement."""
        x = self.placement
        found = hashlib.sha256()
        for array in (x.bounds, x.owner, x.pairs, x.rank):
            found.update(np.ascontiguousarray(array, np.int64))
        return found.hexdigest()[:12]

    def assigned(self, rank: int) -> Assigned:
        """The mask of the pairs that a rank computes."""
        if rank not in self._assigned:
            x = self.placement
            self._assigned[rank] = Assigned(self._mask, x.bounds, x.pairs[x.rank == rank])
        return self._assigned[rank]

    def of(self, of_keys: bool, owner: int, rank: int) -> Chosen:
        """Places in the owner's shard of the tokens that a rank needs."""
        key = of_keys, owner, rank
        if key not in self._found:
            x, mask = self.placement, self.assigned(rank)
            pairs = x.pairs[x.rank == rank]
            own = x.owner[pairs[:, int(of_keys)]] == owner
            edges: list[int] = []
            for block in np.unique(pairs[own, int(of_keys)]).tolist():
                first, last = x.bounds[block : block + 2].tolist()
                for begin, end in mask.met(of_keys, first, last, pairs):
                    a, b = (self._shards.place(owner, token) for token in (begin, end))
                    if edges and edges[-1] == a:
                        edges[-1] = b
                    else:
                        edges += [a, b]
            self._found[key] = Chosen(tuple(edges))
        return self._found[key]


@lru_cache(maxsize=4)
def needs_of(problem: Problem) -> Needs:
    """Needs of all ranks; remembered, as the planner asks for the schedules of all ranks."""
    return Needs(problem)


class Exchange:
    """Rows that a rank gets and gives, and those that its kernel calls need."""

    def __init__(self, s: Schedule, kind: str) -> None:
        self.s, n = s, s.sizes.problem.shards.nshards
        self.needs = needs_of(s.sizes.problem)
        s.mask = self.needs.assigned(s.rank)
        s.channels["all"] = tuple(range(n))
        self.peers = [(s.rank + i) % n for i in range(1, n)]
        own = {
            of_keys: s.array(f"own {x}", x, (s.rank,), "given")
            for of_keys, x in ((False, kind), (True, "kv"))
        }
        self.own_q = Rows(own[False], s.rank)
        # Others' keys that this rank needs, beside all of its own, in the order of ranks.
        owners = sorted([s.rank, *(p for p in self.peers if self._wanted(True, p).edges)])
        whole = Chosen((0, s.sizes.counts(True)[s.rank]))
        spans = tuple(whole if p == s.rank else self._wanted(True, p) for p in owners)
        self.keys = s.array("all kv", "kv", owners, spans=spans)
        self.gradients = owners, spans
        self.k_coming = {
            p: s.receive("all", p, Rows(self.keys, p)) for p in self.peers if p in owners
        }
        self.q_coming = {
            p: s.receive("all", p, Rows(self.of_owner(kind, "from", p), p))
            for p in self.peers
            if self._wanted(False, p).edges
        }
        for p in reversed(self.peers):  # keys first: they are needed first
            self._give(True, own[True], p)
        for p in reversed(self.peers):
            self._give(False, own[False], p)
        s.add(Copy(Rows(own[True], s.rank), Rows(self.keys, s.rank)))
        if not s.sizes.overlap:
            s.wait([*self.k_coming.values(), *self.q_coming.values()])

    def _wanted(self, of_keys: bool, owner: int) -> Chosen:
        return self.needs.of(of_keys, owner, self.s.rank)

    def given(self, of_keys: bool, peer: int) -> Chosen:
        """This rank's tokens that a peer needs."""
        return self.needs.of(of_keys, self.s.rank, peer)

    def _give(self, of_keys: bool, array: str, peer: int) -> None:
        part = self.given(of_keys, peer)
        if part.edges:
            self.s.send("all", peer, Rows(array, self.s.rank, part))

    def of_owner(self, kind: str, way: str, owner: int) -> str:
        """An array for those of an owner's queries that this rank computes with."""
        spans = (self._wanted(False, owner),)
        return self.s.array(f"{kind} {way} {owner}", kind, (owner,), spans=spans)

    def calls(self) -> Iterator[tuple[Rows, Rows]]:
        """Yield queries and keys of the kernel calls, when they are here: own queries first."""
        s = self.s
        yield self.own_q, Rows(self.keys, s.rank)
        for coming, rows in (
            (self.k_coming, lambda m: (self.own_q, m.rows)),
            (self.q_coming, lambda m: (m.rows, Rows(self.keys))),
        ):
            for message in coming.values():
                if s.sizes.overlap:
                    s.wait([message])
                yield rows(message)

    def partials(self, kind: str) -> list[tuple[Message, Chosen]]:
        """Post the receives of what other ranks computed for this rank's tokens."""
        s, found = self.s, []
        of_keys = kind == "dkv"
        for p in self.peers:
            if (part := self.given(of_keys, p)).edges:
                name = s.array(f"{kind} back from {p}", kind, (s.rank,), spans=(part,))
                found.append((s.receive("all", p, Rows(name, s.rank)), part))
        return found

    def collect(self, coming: list[tuple[Message, Chosen]], to: Rows) -> None:
        """Merge it with this rank's own results."""
        for message, part in coming:
            self.s.wait([message])
            self.s.add(Merge(message.rows, to._replace(part=part)))


def forward(s: Schedule) -> None:
    """Write down the forward pass of rank ``s.rank``."""
    x = Exchange(s, "q")
    out = Rows(s.array("out", "out", (s.rank,), "result"), s.rank)
    coming = x.partials("out")
    for queries, keys in x.calls():
        if queries.owner == s.rank:
            s.add(Attend(queries, keys, out))
        else:
            partial = Rows(x.of_owner("out", "to", queries.owner), queries.owner)
            s.add(Attend(queries, keys, partial))
            s.give("all", queries.owner, partial)
    s.release("all")
    x.collect(coming, out)
    s.results = {"out": out}


def backward(s: Schedule) -> None:
    """Write down the backward pass of rank ``s.rank``."""
    x = Exchange(s, "qd")
    owners, spans = x.gradients
    dq = Rows(s.array("dq", "dq", (s.rank,)), s.rank)
    dkv = s.array("all dkv", "dkv", owners, spans=spans)
    s.add(Zero(dq), Zero(Rows(dkv)))
    dq_coming, dkv_coming = x.partials("dq"), x.partials("dkv")
    for queries, keys in x.calls():
        keys_into, into = keys._replace(array=dkv), dq
        if queries.owner != s.rank:
            into = Rows(x.of_owner("dq", "to", queries.owner), queries.owner)
            s.add(Zero(into))
        s.add(Attend(queries, keys, into, keys_into))
        if queries.owner != s.rank:
            s.give("all", queries.owner, into)
    for p in x.k_coming:
        s.give("all", p, Rows(dkv, p))
    s.release("all")
    x.collect(dq_coming, dq)
    x.collect(dkv_coming, Rows(dkv, s.rank))
    s.results = {"dq": dq, "dkv": Rows(dkv, s.rank)}


METHOD = Method(
    forward,
    backward,
    shape=lambda layout: (1, layout.positions, ""),
    distribution="blocks",
    suits=lambda layout: layout.cols == 1 < layout.rows,
    at_once=False,
    place=lambda *sizes: placed(*sizes).runs(),
    digest=lambda problem: needs_of(problem).digest(),
)
