"""Masks: the visible keys of each query, as intervals of global key indices.

A mask gives every query one visible interval ``[begin, end)`` of keys, or several disjoint
intervals.  Restricted to any *sorted* subset of the keys, an interval stays an interval, which two
``searchsorted`` calls find.  So every mask works with every distribution and on every grid.

Windows, prefixes and block-causal masks are in `a2d_mpi.masks.windows`, masks of packed documents
in `a2d_mpi.masks.documents`, and any intervals in `a2d_mpi.masks.arrays`.
`a2d_mpi.masks.patterns` makes masks from their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from a2d_mpi.masks.intervals import EVERYTHING, Interval, Intervals, keys_per_query, tidy


class Mask:
    """Base of all masks: subclasses define `visible`, and the other methods follow from it.

    ``a & b`` shows the keys that both masks show (`Intersection`).

    Attributes
    ----------
    default_distribution : str
        The distribution that balances this mask on every grid.  "balanced" means that no
        distribution in closed form balances the mask.  Plans then choose a distribution by its
        predicted time (`a2d_mpi.sharding.choice`).
    positional : bool
        Whether the visible keys follow from the position of the query among the keys: query i
        stands at key i.  Only positional masks can be aligned with keys of another length.
    varying : bool
        Whether the mask belongs to a batch: those of other batches differ, as documents do.
    """

    default_distribution = "balanced"
    positional = False
    varying = False

    def __new__(cls, *args: object, **others: object) -> Mask:
        """Make a mask; compare masks of a user's class by identity if it defines no ``__eq__``.

        A user's subclass may have attributes that its parent does not compare.  Two different
        masks would then be equal, and a plan would take one for the other.
        """
        if "__eq__" not in vars(cls) and not cls.__module__.startswith("a2d_mpi."):
            cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__
        return super().__new__(cls)

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        """Return the visible keys of each query, in global indices.

        Parameters
        ----------
        q_tokens : (nq,) int64
            Global indices of the queries.

        Returns
        -------
        tuple of (begin, end), each (nq,) int64
            Query ``q_tokens[i]`` sees the keys ``begin[i] <= j < end[i]`` of every pair.  The
            intervals of a query do not overlap.  An interval with ``end <= begin`` is empty.
        """
        raise NotImplementedError

    def aligned(self, seqlen: int, seqlen_kv: int) -> Mask:
        """Return the mask for `seqlen` queries that end where `seqlen_kv` keys end.

        Bottom-right alignment, as in FlashAttention: query i has the position
        ``i + seqlen_kv - seqlen`` among the keys.

        Parameters
        ----------
        seqlen, seqlen_kv : int
            Queries and keys.

        Returns
        -------
        Mask
            This mask if there are as many queries as keys, or if it is not positional.

        Raises
        ------
        ValueError
            If the mask has no meaning for these lengths.
        """
        if seqlen != seqlen_kv:
            if not self.positional:
                raise ValueError(
                    f"{type(self).__name__} cannot align {seqlen} queries with {seqlen_kv} keys"
                )
            return Aligned(self, seqlen_kv - seqlen)
        return self

    def intervals(self, q_tokens: np.ndarray, k_tokens: np.ndarray) -> Intervals:
        """Return the visible keys of each query as positions in `k_tokens`.

        Parameters
        ----------
        q_tokens : (nq,) int64
            Global indices of the queries, in any order.
        k_tokens : (nk,) int64
            Global indices of the keys, sorted.

        Returns
        -------
        Intervals of (begin, end), each (nq,) int64
            ``0 <= begin <= end <= nk``.  There are as few intervals as possible: intervals that
            touch in `k_tokens` are joined.  Empty intervals come last.
        """
        positions = []
        for begin, end in self.visible(q_tokens):
            first = np.searchsorted(k_tokens, begin)
            positions.append((first, np.maximum(first, np.searchsorted(k_tokens, end))))
        found = Intervals(tidy(positions))
        found.varying = self.varying
        return found

    def area(self, q_tokens: np.ndarray, k_tokens: np.ndarray) -> int:
        """Count the visible (query, key) pairs.  Balance and FLOP rates follow from this number.

        Parameters
        ----------
        q_tokens, k_tokens : (nq,), (nk,) int64
            As in `intervals`.

        Returns
        -------
        int
        """
        return int(np.sum(keys_per_query(self.intervals(q_tokens, k_tokens))))

    def dense(self, q_tokens: np.ndarray, k_tokens: np.ndarray) -> np.ndarray:
        """Return the mask as a matrix, for references.

        Parameters
        ----------
        q_tokens, k_tokens : (nq,), (nk,) int64
            Global indices of queries and keys, in any order.

        Returns
        -------
        (nq, nk) bool
            True where a query sees a key.
        """
        k = np.asarray(k_tokens)[None, :]
        seen = np.zeros((len(q_tokens), len(k_tokens)), dtype=bool)
        for begin, end in self.visible(np.asarray(q_tokens)):
            seen |= (k >= begin[:, None]) & (k < end[:, None])
        return seen

    def __and__(self, other: Mask) -> Mask:
        return Intersection(self, other) if isinstance(other, Mask) else NotImplemented


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    # All queries cost the same, so any equal shards balance.  Contiguous shards keep neighbouring
    # tokens together.
    default_distribution = "contiguous"

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        n = len(q_tokens)
        return ((np.zeros(n, np.int64), np.full(n, EVERYTHING)),)

    def corners(self, seqlen_kv: int) -> np.ndarray:
        return np.zeros(1, np.int64)

    def aligned(self, seqlen: int, seqlen_kv: int) -> Mask:
        return self


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and the keys before it."""

    default_distribution = "zigzag"
    positional = True

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        return ((np.zeros(len(q_tokens), np.int64), np.asarray(q_tokens, np.int64) + 1),)

    def corners(self, seqlen_kv: int) -> np.ndarray:
        return np.array([0, seqlen_kv])


@dataclass(frozen=True)
class Aligned(Mask):
    """A positional mask whose query i stands at the position ``i + offset`` among the keys.

    `Mask.aligned` makes it.

    Parameters
    ----------
    mask : Mask
    offset : int
        Keys minus queries.
    """

    mask: Mask
    offset: int

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        return self.mask.visible(np.asarray(q_tokens, np.int64) + self.offset)

    def aligned(self, seqlen: int, seqlen_kv: int) -> Mask:
        return self.mask.aligned(seqlen, seqlen_kv)


@dataclass(frozen=True)
class Intersection(Mask):
    """A query sees the keys that both masks show: ``SlidingWindow(255) & Documents(cu_seqlens)``.

    Parameters
    ----------
    first, second : Mask
    """

    first: Mask
    second: Mask

    @property
    def varying(self) -> bool:
        return self.first.varying or self.second.varying

    def visible(self, q_tokens: np.ndarray) -> tuple[Interval, ...]:
        both = product(self.first.visible(q_tokens), self.second.visible(q_tokens))
        return tuple((np.maximum(a, c), np.minimum(b, d)) for (a, b), (c, d) in both)

    def aligned(self, seqlen: int, seqlen_kv: int) -> Mask:
        both = (x.aligned(seqlen, seqlen_kv) for x in (self.first, self.second))
        return Intersection(*both)
