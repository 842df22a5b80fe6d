"""Assignment of blocks of tokens to owners and of their pairs to ranks, with its traffic.

A rank that needs a query of another rank receives q and sends back its partial out; a key that it
needs brings k and v.  Elements are counted in q's: one of ``nheads headdim`` elements a token.
"""

from __future__ import annotations

import numpy as np

from a2d_mpi.masks.intervals import merged
from a2d_mpi.sharding.demand import Classes, Demand


class Assignment:
    """Owners and computing ranks, and the traffic and work of every rank, kept as they change.

    Attributes
    ----------
    demand : Demand
    ranks : int
    owner : (blocks,) int64
    rank : (pairs,) int64
    needs : pair of (ranks, classes) int32
        Pairs on each rank that need each class of queries, and each class of keys.
    received, sent : (ranks,) float64
        Elements that a forward pass moves, in tokens of q.
    work : (ranks,) float64
        Visible pairs.
    """

    def __init__(self, demand: Demand, ranks: int, owner: np.ndarray, rank: np.ndarray) -> None:
        self.demand, self.ranks = demand, ranks
        self.owner = np.array(owner, np.int64)
        self.rank = np.array(rank, np.int64)
        self.work = np.bincount(self.rank, demand.visible, ranks)
        self.needs = tuple(self._counts(x) for x in (demand.queries, demand.keys))
        self.count_traffic()

    def copy(self) -> Assignment:
        """The same assignment, to be changed apart."""
        return Assignment(self.demand, self.ranks, self.owner, self.rank)

    @property
    def largest(self) -> float:
        """Most elements that any rank sends or receives."""
        return float(max(self.received.max(), self.sent.max()))

    @property
    def uneven(self) -> float:
        """Largest over mean work."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens that each rank owns."""
        return np.bincount(self.owner, self.demand.tokens, self.ranks)

    def runs(self) -> tuple[tuple[range, ...], ...]:
        """The tokens of every rank in order, neighbouring blocks as one run."""
        found: list[list[range]] = [[] for _ in range(self.ranks)]
        for owner, block in zip(self.owner.tolist(), self.demand.blocks):
            found[owner].append(block)
        return tuple(tuple(merged(x)) for x in found)

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Elements that come with each class of queries (once each way) and of keys."""
        x = self.demand
        return x.queries.weight, 2 * x.kv_share * x.keys.weight

    def block_needs(self) -> tuple[np.ndarray, np.ndarray]:
        """Elements of q and of k, v of every block that each rank needs: (ranks, blocks)."""
        found = []
        classes = self.demand.queries, self.demand.keys
        for needs, weight, x in zip(self.needs, self.weights(), classes):
            total = np.zeros((len(self.owner), self.ranks))
            np.add.at(total, x.block, ((needs > 0) * weight).T)
            found.append(total.T)
        return found[0], found[1]

    def count_traffic(self) -> None:
        """Count `received` and `sent` for the owners and ranks as they are."""
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
        """Let `target` compute some pairs of `source`, and update traffic and work."""
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
