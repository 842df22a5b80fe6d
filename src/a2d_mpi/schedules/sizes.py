"""Ranks, spans of the sequence, and the sizes on which schedules depend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.chunks import chunks
from a2d_mpi.core.distribution import Distribution

Ranks = int | np.ndarray  # a rank of the context group, or one for each rank


def identity(x: Ranks) -> int | float:
    """Key of ranks, or of a number for each of them: arrays are told apart by what they are."""
    return id(x) if isinstance(x, np.ndarray) else x


class Span(NamedTuple):
    """The tokens [begin, end) of the sequence."""

    begin: int
    end: int


@dataclass(frozen=True)
class Sizes:
    """Sizes that schedules depend on, of a context group of R x C ranks.

    Attributes
    ----------
    rows, cols : int
        R, C: rank p is at row ``p // C`` and column ``p % C``.
    counts : tuple of int
        Tokens of every rank's shard.
    nheads, nheads_kv : int
        That the group computes.
    overlap : bool
        Whether to compute while messages travel.
    inner : str
        Name of the channel of inner hops, of rings.
    narrow : bool
        Whether the caller's dtype is narrower than that of the computation.
    shares_kv : bool
        Whether several context groups share a KV head.
    shards : Distribution or None
        Tokens of every rank, of methods that ask for spans of them.
    nodes : tuple of int, optional
        Node of every rank; None: each is alone on its node.
    """

    rows: int
    cols: int
    counts: tuple[int, ...]
    nheads: int
    nheads_kv: int
    overlap: bool = True
    inner: str = ""
    narrow: bool = False
    shares_kv: bool = False
    shards: Distribution | None = None
    nodes: tuple[int, ...] | None = None

    def within(self, owner: int, span: Span | None) -> slice:
        """Place of the tokens of a span in their owner's shard."""
        if span is None:
            return slice(0, self.counts[owner])
        return slice(*(self.shards.place(owner, token) for token in span))

    def chunks(self, owner: Ranks, ranks: int) -> list[tuple[int, int]]:
        """Chunks in which an owner's shard travels along a row or column of so many ranks."""
        tokens = self.counts[owner] if isinstance(owner, int) else self.most
        return [(chunk, ranks) for chunk in range(len(chunks(tokens, ranks)))]

    @cached_property
    def most(self) -> int:
        """Tokens of the largest shard."""
        return max(self.counts)
