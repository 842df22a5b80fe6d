"""A context-parallel group as programs see it: its grid, its problem, and the required rows."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from a2d_mpi.core.config import AttentionConfig
from a2d_mpi.masks.intervals import Runs, cut, size
from a2d_mpi.masks.mask import Full
from a2d_mpi.schedules.chunks import chunks
from a2d_mpi.schedules.problem import Problem
from a2d_mpi.schedules.steps import KINDS, Array
from a2d_mpi.sharding.distribution import Distribution


@dataclass(frozen=True)
class Group:
    """R x C ranks that share one slice of the heads.

    Attributes
    ----------
    rows, cols : int
        R, C: rank p is at row ``p // C`` and column ``p % C``.
    problem : Problem
        Of all ranks of the group.
    config : AttentionConfig
        With the heads that one rank computes.
    overlap : bool
        Whether to compute while messages travel.
    stream : bool
        Whether shards and partial results of one side of a tile pass through two buffers.
    inner : str
        Name of the channel of inner hops, of rings.
    mixed_precision : bool
        Whether the storage dtype is narrower than the accumulation dtype.
    shares_kv : bool
        Whether several groups share a KV head.
    nodes : tuple of int, optional
        Node of every rank; None: each is alone on its node.
    """

    rows: int
    cols: int
    problem: Problem
    config: AttentionConfig
    overlap: bool = True
    stream: bool = False
    inner: str = ""
    mixed_precision: bool = False
    shares_kv: bool = False
    nodes: tuple[int, ...] | None = None
    _sets: dict[tuple, frozenset[int]] = field(default_factory=dict, repr=False, compare=False)
    _bytes: dict[tuple, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash((self.rows, self.cols, self.problem.shards))  # nodes may be many

    @property
    def uneven(self) -> bool:
        """True if the mask lets some of three or more ranks gather less than others."""
        return type(self.problem.mask) is not Full and self.rows * self.cols > 2

    def gathers_first(self, backward: bool) -> bool:
        """Tell whether partial results wait until all ranks have all rows that they gather.

        For methods that gather keys first.  In the forward pass it gains nothing if the rows of
        queries, which come last, are as large as the rows of keys.
        """
        return self.uneven and (backward or self.elements("k", "v") > self.elements("q"))

    def elements(self, *tensors: str) -> int:
        """Elements of a token in tensors: of all heads that the group computes."""
        return sum(math.prod(self.config.shape(x)) for x in tensors)

    def row_of(self, rank: int) -> range:
        """The ranks of a rank's row: the owners of its tile's queries."""
        first = rank // self.cols * self.cols
        return range(first, first + self.cols)

    def column_of(self, rank: int) -> range:
        """The ranks of a rank's column: the owners of its tile's keys."""
        return range(rank % self.cols, self.rows * self.cols, self.cols)

    def ring_of(self, first: int, number: int, size: int) -> Collection[int]:
        """Ranks from the first one on, in rings of `size` ranks: after a ring's last its first."""
        begin = first // size * size
        if first + number <= begin + size:
            return range(first, first + number)
        key = first, number, size
        if key not in self._sets:  # the same object for all ranks: it is looked up often
            members = (begin + (first + i) % size for i in range(number))
            self._sets[key] = frozenset(members)
        return self._sets[key]

    def row_bytes(self, array: Array) -> list[int]:
        """Bytes of a row in each tensor of an array; of a packed one, in all tensors together."""
        key = array.kind, array.accumulated, array.all_heads, array.packed, array.wire
        if key not in self._bytes:
            config = self.problem.config if array.all_heads else self.config
            sizes = [
                config.nbytes(x, x in array.accumulated, array.wire) for x in KINDS[array.kind]
            ]
            self._bytes[key] = [sum(sizes)] if array.packed else sizes
        return self._bytes[key]

    def encodes(self, array: Array) -> bool:
        """Whether the tensors of an array become smaller when they travel."""
        if self.config.wire is None:
            return False
        return self.row_bytes(replace(array, wire=True)) != self.row_bytes(array)

    def shards(self, of_keys: bool) -> Distribution:
        """Tokens of every rank."""
        return self.problem.shards_kv if of_keys else self.problem.shards

    def whole(self, of_keys: bool, owner: int) -> Runs:
        """Places of all tokens of a shard."""
        count = (self.problem.counts_kv if of_keys else self.problem.counts)[owner]
        return ((0, count),) if count else ()

    def required(self, of_keys: bool, owner: int, others: Collection[int]) -> Runs:
        """Places of an owner's tokens that other shards see or are seen by.

        See `a2d_mpi.sharding.visibility.Visibility.required`.
        """
        return self.problem.visibility.required(of_keys, owner, others)


def chunked(places: Runs, ranks: int) -> list[Runs]:
    """Places in the chunks in which they travel along a row or column of `ranks` ranks."""
    n = size(places)
    return [cut(places, x.start, x.stop) for x in chunks(n, ranks)] if n else []
