"""Sizes on which schedules depend, spans of the sequence, and tokens that meet others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.chunks import chunks
from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.meetings import Others, Ranks
from a2d_mpi.core.problem import Problem


def identity(x: Ranks) -> int | float:
    """Key of ranks, or of a number for each of them: arrays are told apart by what they are."""
    return id(x) if isinstance(x, np.ndarray) else x


class Span(NamedTuple):
    """The tokens [begin, end) of the sequence."""

    begin: int
    end: int


class Chosen(NamedTuple):
    """Some tokens of a shard: the places in it where each run of them begins and ends."""

    edges: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Meets:
    """Of an owner's tokens those that meet shards of others through the mask.

    Attributes
    ----------
    others : Others
        Owners of the keys that these queries see, or of the queries that see these keys.
    chunk : (int, int), optional
        The i-th of the chunks in which they travel along n ranks; None: all.
    provided, unless : Others, optional
        There are such tokens only if the owner has some that meet the former, and none that meet
        the latter.
    """

    others: Others
    chunk: tuple[int, int] | None = None
    provided: Others | None = None
    unless: Others | None = None


def chunk_of(part: object) -> tuple[int, int] | None:
    """The chunk in which rows travel; None: all in one message."""
    if isinstance(part, Meets):
        return part.chunk
    return part if type(part) is tuple else None


@dataclass(frozen=True)
class Sizes:
    """Sizes that schedules depend on, of a context group of R x C ranks.

    Attributes
    ----------
    rows, cols : int
        R, C: rank p is at row ``p // C`` and column ``p % C``.
    problem : Problem
        Of the group.
    overlap : bool
        Whether to compute while messages travel.
    inner : str
        Name of the channel of inner hops, of rings.
    narrow : bool
        Whether the caller's dtype is narrower than that of the computation.
    shares_kv : bool
        Whether several context groups share a KV head.
    nodes : tuple of int, optional
        Node of every rank; None: each is alone on its node.
    """

    rows: int
    cols: int
    problem: Problem
    overlap: bool = True
    inner: str = ""
    narrow: bool = False
    shares_kv: bool = False
    nodes: tuple[int, ...] | None = None

    @property
    def nheads(self) -> int:
        """Query heads that the group computes."""
        return self.problem.config.nheads

    @property
    def nheads_kv(self) -> int:
        """KV heads that the group computes."""
        return self.problem.config.nheads_kv

    def shards(self, of_keys: bool) -> Distribution:
        """Tokens of every rank."""
        return self.problem.shards_kv if of_keys else self.problem.shards

    def counts(self, of_keys: bool) -> tuple[int, ...]:
        """Number of tokens of every rank."""
        return self.problem.counts_kv if of_keys else self.problem.counts

    def chunks(
        self, owner: Ranks, ranks: int, of_keys: bool, others: Others | None = None
    ) -> list[tuple[int, int]]:
        """Chunks in which an owner's shard travels along a row or column of so many ranks.

        With `others`, those of its tokens that meet these; none if there are no such tokens.
        """
        if not isinstance(owner, int):
            tokens = max(self.counts(of_keys))
        elif others is None or self.problem.meetings is None:
            tokens = self.counts(of_keys)[owner]
        elif not (tokens := self.problem.meetings.count(of_keys, owner, others)):
            return []
        return [(chunk, ranks) for chunk in range(len(chunks(tokens, ranks)))]
