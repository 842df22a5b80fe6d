"""Assignments of blocks of tokens to owners and of pairs of blocks to ranks, with their traffic.

A rank that needs a query of another rank receives q and sends back its partial out.  A rank that
needs a key receives k and v.  The unit of traffic is one token of q: ``nheads headdim`` elements.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.masks.intervals import merged
from a2d_mpi.sharding.demand import Classes, Demand


class Assignment:
    """Owners and computing ranks, and the traffic and work of every rank, updated on changes.

    Attributes
    ----------
    demand : Demand
    ranks : int
        Number of ranks.
    owner : (blocks,) int64
        Rank that owns each block.
    rank : (pairs,) int64
        Rank that computes each pair of blocks.
    needs : pair of (ranks, classes) int32
        Number of pairs on each rank that need each class of queries, and each class of keys.
    received, sent : (ranks,) float64
        Traffic of a forward pass, in tokens of q.
    work : (ranks,) float64
        Visible pairs that each rank computes.
    """

    def __init__(self, demand: Demand, ranks: int, owner: np.ndarray, rank: np.ndarray) -> None:
        self.demand, self.ranks = demand, ranks
        self.owner = np.array(owner, np.int64)
        self.rank = np.array(rank, np.int64)
        self.work = np.bincount(self.rank, demand.visible, ranks)
        self.needs = tuple(self._counts(x) for x in (demand.queries, demand.keys))
        self.count_traffic()

    def copy(self) -> Assignment:
        """Return a copy that can be changed independently."""
        return Assignment(self.demand, self.ranks, self.owner, self.rank)

    @property
    def largest(self) -> float:
        """Traffic of the busiest rank: the most that any rank sends or receives."""
        return float(max(self.received.max(), self.sent.max()))

    @property
    def uneven(self) -> float:
        """Largest work of a rank over the mean work."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens that each rank owns."""
        return np.bincount(self.owner, self.demand.tokens, self.ranks)

    def runs(self) -> tuple[tuple[range, ...], ...]:
        """Return the runs of tokens of every rank, in order; neighbouring blocks are joined."""
        blocks: list[list[range]] = [[] for _ in range(self.ranks)]
        for owner, block in zip(self.owner.tolist(), self.demand.blocks):
            blocks[owner].append(block)
        return tuple(tuple(merged(x)) for x in blocks)

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the traffic of each class of queries (in one direction) and of keys."""
        demand = self.demand
        return demand.queries.weight, 2 * demand.kv_share * demand.keys.weight

    def block_needs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the traffic of q, and of k and v, by rank and needed block: (ranks, blocks)."""
        both = []
        classes = self.demand.queries, self.demand.keys
        for needs, weight, x in zip(self.needs, self.weights(), classes):
            total = np.zeros((len(self.owner), self.ranks))
            np.add.at(total, x.block, ((needs > 0) * weight).T)
            both.append(total.T)
        return both[0], both[1]

    def count_traffic(self) -> None:
        """Set `received` and `sent` from the present owners and ranks."""
        block = np.arange(len(self.owner))
        queries, keys = self.block_needs()
        for x in (queries, keys):
            x[self.owner, block] = 0
        to_all_q, to_all_k = queries.sum(axis=0), keys.sum(axis=0)
        partials = np.bincount(self.owner, to_all_q, self.ranks)
        self.received = (queries + keys).sum(axis=1) + partials
        self.sent = queries.sum(axis=1) + partials
        self.sent += np.bincount(self.owner, to_all_k, self.ranks)

    def move(self, pairs: np.ndarray, source: int, target: int) -> None:
        """Move the given pairs from rank `source` to `target`; update traffic and work."""
        for queries, needs, weight, classes in zip(
            (True, False), self.needs, self.weights(), (self.demand.queries, self.demand.keys)
        ):
            change = np.bincount(classes.of(pairs)[1], minlength=needs.shape[1])
            owner = self.owner[classes.block]
            for rank, sign in ((source, -1), (target, 1)):
                before = needs[rank] > 0
                needs[rank] += (sign * change).astype(np.int32)
                moved = np.flatnonzero(((needs[rank] > 0) != before) & (owner != rank))
                if not len(moved):
                    continue
                elements = sign * weight[moved]
                of_owners = np.bincount(owner[moved], elements, self.ranks)
                self.received[rank] += elements.sum()
                self.sent += of_owners
                if queries:
                    self.sent[rank] += elements.sum()
                    self.received += of_owners
        work = self.demand.visible[pairs].sum()
        self.work[source] -= work
        self.work[target] += work
        self.rank[pairs] = target

    def _counts(self, classes: Classes) -> np.ndarray:
        pair, index = classes.of(np.arange(len(self.rank)))
        counts = np.zeros((self.ranks, len(classes.block)), np.int32)
        np.add.at(counts, (self.rank[pair], index), 1)
        return counts
