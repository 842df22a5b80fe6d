"""Distributions: the owner of each token.

A distribution divides the sequence ``[0, seqlen)`` into one *shard* per rank.  A shard is a sorted
array of global token indices.  Any sequence length works, even one below the number of ranks.
Shards may differ in size, and a shard may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from a2d_mpi.core.config import DISTRIBUTIONS
from a2d_mpi.masks.compiled import CompiledMask, compile_mask
from a2d_mpi.masks.intervals import Runs, joined, members
from a2d_mpi.masks.mask import Full
from a2d_mpi.sharding.progressions import concatenated, share

FORMULAS = DISTRIBUTIONS[:-1]  # distributions that follow from the sizes alone


@dataclass(frozen=True)
class Distribution:
    """The division of a sequence into shards.

    Parameters
    ----------
    name : {"contiguous", "zigzag", "striped", "triangle", "balanced"}
        * contiguous: shard p is ``[N p / P, N (p+1) / P)``.
        * zigzag: ``[0, N)`` is cut into 2P slices at ``N i / (2P)``.  Shard p has the slices p and
          ``2P-1-p``.  With row-major ranks this balances the causal mask on *every* grid.  The
          unit of work is a slice of queries times a slice of keys.  Rank (r, c) of an R x C grid
          computes ``C r + C - c - 1/2`` units for the lower slices of its row.  For the upper
          slices it computes ``C R + C (R-1-r) + c + 1/2`` units.  The sum is ``2 C R``.
        * striped: shard p is the tokens p, p+P, ... (Striped Attention, arXiv:2311.09431).
        * triangle: a shard has four pieces, see `a2d_mpi.sharding.triangle_shards`.  P / U must be
          T (T-1) / 2.
        * balanced: the shards are given by `listed`.
    seqlen : int
        N, the number of tokens.
    nshards : int
        P, the number of shards, one per rank.
    group : int
        Size U of the Ulysses groups.  The shards of a Ulysses group form one of the ``P / U``
        shards of the same distribution without Ulysses groups.  So with "striped", shard p is the
        token ``p // U + (p % U) P / U`` and every P-th token after it.
    listed : tuple of tuple of range, optional
        Runs of every shard, in order, with step 1.
    why : str
        Reason for the choice of this distribution, in words for users.  Comparisons ignore it.

    Raises
    ------
    ValueError
        If the name is unknown, or the shards form no triangle.
    """

    name: str
    seqlen: int
    nshards: int
    group: int = 1
    listed: tuple[tuple[range, ...], ...] | None = field(default=None, repr=False)
    why: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # NumPy's integers would overflow in the products below.
        object.__setattr__(self, "seqlen", int(self.seqlen))
        object.__setattr__(self, "nshards", int(self.nshards))
        if self.name not in DISTRIBUTIONS:
            raise ValueError(f"unknown distribution {self.name!r}; one of {DISTRIBUTIONS}")
        if self.name == "triangle":
            from a2d_mpi.sharding.triangle_shards import segments

            segments(self.nshards // self.group)

    def __hash__(self) -> int:
        return hash((self.name, self.seqlen, self.nshards, self.group))  # lists may be long

    def positions(self, heads: int) -> Distribution:
        """Return the distribution over grid positions: each joins `heads` shards.

        The `heads` ranks of a position are consecutive: they form a Ulysses group.
        """
        listed, u = self.listed, heads
        if u == 1:
            return self
        if listed is not None:
            groups = (listed[i : i + u] for i in range(0, self.nshards, u))
            listed = tuple(
                tuple(sorted((r for runs in x for r in runs), key=lambda r: r.start))
                for x in groups
            )
        return Distribution(self.name, self.seqlen, self.nshards // u, listed=listed)

    def runs(self, shard: int) -> tuple[range, ...]:
        """Return the runs of tokens of `shard`, in order; runs may be empty."""
        return self._runs[shard]

    @cached_property
    def _runs(self) -> tuple[tuple[range, ...], ...]:
        """Runs of every shard; the planner asks for all shards many times."""
        return self.listed or tuple(map(self._of_formula, range(self.nshards)))

    def _of_formula(self, shard: int) -> tuple[range, ...]:
        n, p = self.seqlen, self.nshards
        if self.name == "contiguous":
            return (range(n * shard // p, n * (shard + 1) // p),)
        if self.name == "striped":
            position, place = divmod(shard, self.group)
            return (range(position + place * (p // self.group), n, p),)
        if self.name == "triangle":
            from a2d_mpi.sharding.triangle_shards import pieces, segments

            position, place = divmod(shard, self.group)
            of_position = pieces(n, segments(p // self.group), position)
            return share(of_position, place, self.group)
        return tuple(
            range(n * i // (2 * p), n * (i + 1) // (2 * p)) for i in (shard, 2 * p - 1 - shard)
        )

    def tokens(self, shard: int) -> np.ndarray:
        """Return the global token indices of `shard`, sorted, (counts[shard],) int64."""
        return concatenated(self.runs(shard))

    def places(self, shard: int, tokens: Runs) -> Runs:
        """Return the places in the shard at which its tokens lie in `tokens`."""
        places, done = [], 0
        for r in self.runs(shard):
            places += [(done + a, done + b) for a, b in members(r, tokens)]
            done += len(r)
        return joined(places)

    def at(self, shard: int, places: Runs) -> list[range]:
        """Return the tokens at `places` in a shard, in order, as non-empty progressions."""
        tokens, done = [], 0
        for r in self.runs(shard):
            last = done + len(r)
            for begin, end in places:
                a, b = max(begin, done), min(end, last)
                if a < b:
                    tokens.append(r[a - done : b - done])
            done = last
        return tokens

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens of every shard."""
        return tuple(sum(map(len, runs)) for runs in self._runs)

    def slices(self, shard: int) -> Iterator[tuple[slice, slice]]:
        """Yield pairs (slice of the shard, slice of the sequence), one for each run of tokens."""
        done = 0
        for r in self.runs(shard):
            if len(r):
                yield slice(done, done + len(r)), slice(r.start, r.stop, r.step)
                done += len(r)


def distribute(
    name: str,
    seqlen: int,
    rows: int,
    cols: int,
    heads: int = 1,
    why: str = "",
    seen: CompiledMask | None = None,
) -> Distribution:
    """Return the distribution of one sequence on ranks that compute rows x cols tiles.

    Parameters
    ----------
    name : str
        A name of `Distribution`.
    seqlen, rows, cols, heads : int
        The number of tokens, and R, C and U.
    why : str
        Reason for the choice, for users.
    seen : CompiledMask, optional
        Mask of as many queries as keys, for "balanced".  Default: every query sees every key.
    """
    listed = None
    if name == "balanced":
        from a2d_mpi.sharding.balance import balanced

        seen = seen or compile_mask(Full(), seqlen, seqlen)
        listed = balanced(seen, rows, cols, heads)
    return Distribution(name, seqlen, rows * cols * heads, heads, listed, why)
