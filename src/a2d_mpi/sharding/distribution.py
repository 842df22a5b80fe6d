"""Distributions: the owner of each token.

A distribution cuts the sequence ``[0, seqlen)`` into one *shard* per rank, each a sorted array of
global token indices.  Any seqlen works, also one below the number of ranks: shards differ by a few
tokens, and some may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from a2d_mpi.core.config import DISTRIBUTIONS
from a2d_mpi.masks.intervals import Runs, joined, members

FORMULAS = DISTRIBUTIONS[:-1]  # of the sequence and the ranks alone
LISTED = ("balanced", "blocks")  # those whose runs are given: they depend on a mask
Shards = tuple[tuple[range, ...], ...]  # the tokens of every shard, in order


@dataclass(frozen=True)
class Distribution:
    """Shards of a sequence.

    Parameters
    ----------
    name : {"contiguous", "zigzag", "striped", "triangle", "balanced", "blocks"}
        * contiguous: shard p is ``[N p / P, N (p+1) / P)``.
        * zigzag: cut ``[0, N)`` into 2P slices at ``N i / (2P)``; shard p is the slices p and
          ``2P-1-p``.  With row-major ranks it balances the causal mask on *every* grid: counted
          in pairs of slices, rank (r, c) of an R x C grid does ``C r + C - c - 1/2`` for its lower
          queries and ``C R + C (R-1-r) + c + 1/2`` for its upper ones, ``2 C R`` in all.
        * striped: shard p is the tokens p, p+P, ... (Striped Attention, arXiv:2311.09431).
        * triangle: four pieces a shard, see `a2d_mpi.sharding.triangle`.  P / U is T (T-1) / 2.
        * balanced, blocks: those of `listed`.
    seqlen : int
        N, the number of tokens.
    nshards : int
        P, the number of shards, one per rank.
    group : int
        Size U of the Ulysses groups.  The shards of each Ulysses group are together one of the
        ``P / U`` shards of the same distribution without Ulysses groups.  For striped ones shard p
        then is the token ``p // U + (p % U) P / U`` and every P-th token after it; the other
        distributions have this property anyway.
    listed : tuple of tuple of range, optional
        Runs of every shard, in order, of step 1.
    why : str
        Why it was chosen, for users.  Distributions are equal whatever it says.

    Raises
    ------
    ValueError
        For an unknown name, a negative seqlen, no shards, a `group` that does not divide them,
        shards that are no triangle, or listed runs that are missing or of another size.
    """

    name: str
    seqlen: int
    nshards: int
    group: int = 1
    listed: Shards | None = field(default=None, repr=False)
    why: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # NumPy's integers would overflow in the products below.
        object.__setattr__(self, "seqlen", int(self.seqlen))
        object.__setattr__(self, "nshards", int(self.nshards))
        if self.name not in (*DISTRIBUTIONS, *LISTED):
            raise ValueError(f"unknown distribution {self.name!r}; one of {DISTRIBUTIONS}")
        if self.seqlen < 0 or self.nshards < 1:
            raise ValueError(
                f"need seqlen >= 0 and nshards >= 1, got {self.seqlen} and {self.nshards}"
            )
        if self.group < 1 or self.nshards % self.group:
            raise ValueError(f"Ulysses groups of {self.group} do not divide {self.nshards} shards")
        if self.name == "triangle":
            from a2d_mpi.sharding.triangle import segments

            segments(self.nshards // self.group)
        if (self.name in LISTED) != (self.listed is not None):
            raise ValueError(f"a {self.name} distribution, and its runs are {self.listed!r}")
        if self.listed is not None:
            found = len(self.listed), sum(len(r) for runs in self.listed for r in runs)
            if found != (self.nshards, self.seqlen):
                raise ValueError(
                    f"the runs of {found[0]} shards with {found[1]} tokens are listed for "
                    f"{self.nshards} shards and {self.seqlen} tokens"
                )

    def __hash__(self) -> int:
        return hash((self.name, self.seqlen, self.nshards, self.group))  # lists may be long

    def positions(self, heads: int) -> Distribution:
        """The distribution of Ulysses groups of so many ranks: the shards of each together."""
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
        """The tokens of `shard`, in order; runs may be empty."""
        known = self._known
        if shard not in known:
            known[shard] = self._found(shard)
        return known[shard]

    @cached_property
    def _known(self) -> dict[int, tuple[range, ...]]:
        """Runs of the shards that were asked for: planners ask for all, again and again."""
        return {}

    def _found(self, shard: int) -> tuple[range, ...]:
        n, p = self.seqlen, self.nshards
        if not 0 <= shard < p:
            raise ValueError(f"shard {shard} is not in [0, {p})")
        if self.listed is not None:
            return self.listed[shard]
        if self.name == "contiguous":
            return (range(n * shard // p, n * (shard + 1) // p),)
        if self.name == "striped":
            position, place = divmod(shard, self.group)
            return (range(position + place * (p // self.group), n, p),)
        if self.name == "triangle":
            from a2d_mpi.sharding.triangle import pieces, segments

            position, place = divmod(shard, self.group)
            whole = pieces(n, segments(p // self.group), position)
            return share(whole, place, self.group)
        return tuple(
            range(n * i // (2 * p), n * (i + 1) // (2 * p)) for i in (shard, 2 * p - 1 - shard)
        )

    def tokens(self, shard: int) -> np.ndarray:
        """Global indices of the tokens of `shard`: sorted, (counts[shard],) int64."""
        runs = (np.arange(r.start, r.stop, r.step) for r in self.runs(shard))
        return np.concatenate([np.zeros(0, np.int64), *runs])

    def count(self, shard: int) -> int:
        """Number of tokens of `shard`, without listing them."""
        return sum(map(len, self.runs(shard)))

    def places(self, shard: int, tokens: Runs) -> Runs:
        """Places in `shard` of its tokens among these runs of tokens."""
        found, done = [], 0
        for r in self.runs(shard):
            found += [(done + a, done + b) for a, b in members(r, tokens)]
            done += len(r)
        return joined(found)

    def at(self, shard: int, places: Runs) -> list[range]:
        """The tokens at these places of `shard`, in order, as progressions; none is empty."""
        found, done = [], 0
        for r in self.runs(shard):
            last = done + len(r)
            for begin, end in places:
                a, b = max(begin, done), min(end, last)
                if a < b:
                    found.append(r[a - done : b - done])
            done = last
        return found

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens of every shard."""
        return tuple(self.count(p) for p in range(self.nshards))

    def slices(self, shard: int) -> Iterator[tuple[slice, slice]]:
        """Few pairs (slice of the shard, slice of the sequence) that cover the shard."""
        done = 0
        for r in self.runs(shard):
            if len(r):
                yield slice(done, done + len(r)), slice(r.start, r.stop, r.step)
                done += len(r)


def share(pieces: tuple[range, ...], place: int, places: int) -> tuple[range, ...]:
    """One of several equal shares of the tokens of some pieces, one piece after the other."""
    n, done, found = sum(map(len, pieces)), 0, []
    begin, end = n * place // places, n * (place + 1) // places
    for piece in pieces:
        found.append(piece[max(0, begin - done) : max(0, end - done)])
        done += len(piece)
    return tuple(found)


def shares(runs: tuple[range, ...], places: int) -> list[tuple[range, ...]]:
    """All equal shares of the tokens of some runs, without empty runs."""
    return [tuple(filter(None, share(runs, i, places))) for i in range(places)]
