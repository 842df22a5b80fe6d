"""The group of ranks of a program: its grid, its problem, and the required rows."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.masks.intervals import Runs
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.steps import KINDS, TokenArray
from a2d_mpi.sharding.distribution import Distribution


@dataclass(frozen=True)
class Group:
    """R x C ranks that have the same heads: a context-parallel group.

    For the exchange of heads it is a Ulysses group, in one row of U ranks.

    Attributes
    ----------
    rows, cols : int
        R, C: rank p is at row ``p // C`` and column ``p % C``.
    problem : Problem
        The problem of all ranks of the group.
    config : AttentionConfig
        The config with the heads that a program computes, perhaps fewer than `problem` has.
    shares_kv : bool
        Whether several groups share a KV head.
    nodes : tuple of int, optional
        Node of every rank, for methods that use it; None for other methods.
    ring : bool
        See `a2d_mpi.schedules.method.Method.ring`.
    """

    rows: int
    cols: int
    problem: Problem
    config: AttentionConfig
    shares_kv: bool = False
    nodes: tuple[int, ...] | None = None
    ring: bool = False
    _bytes: dict[tuple, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash((self.rows, self.cols, self.problem.queries))  # nodes may be many

    def elements(self, *tensors: str) -> int:
        """Return the elements of one token in `tensors`, over all heads of the group."""
        return sum(math.prod(self.config.shape(x)) for x in tensors)

    def row_bytes(self, array: TokenArray) -> list[int]:
        """Return the bytes of a row in each tensor of an array; one sum if it is a parcel."""
        key = array.kind, array.accumulated, array.all_heads, array.parcel, array.wire
        if key not in self._bytes:
            config = self.problem.config if array.all_heads else self.config
            sums = array.accumulated
            sizes = [config.nbytes(x, x in sums, array.wire) for x in KINDS[array.kind]]
            self._bytes[key] = [sum(sizes)] if array.parcel else sizes
        return self._bytes[key]

    def distribution(self, of_keys: bool) -> Distribution:
        """Return the distribution of the keys, or of the queries."""
        return self.problem.keys if of_keys else self.problem.queries

    def all_places(self, of_keys: bool, owner: int) -> Runs:
        """Return the places of all tokens of a shard."""
        count = self.distribution(of_keys).counts[owner]
        return ((0, count),) if count else ()

    def required(self, of_keys: bool, owner: int, others: Collection[int]) -> Runs:
        """Return the places of an owner's tokens that other shards require.

        See `a2d_mpi.sharding.visibility.Visibility`.
        """
        return self.problem.visibility.required(of_keys, owner, others)
