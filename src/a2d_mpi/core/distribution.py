"""Who owns which token.

A distribution cuts the sequence ``[0, seqlen)`` into one *part* per rank, each a sorted array of
global token indices.  Any seqlen works, also one below the number of ranks: parts then differ by
a few tokens, and some are empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

DISTRIBUTIONS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Distribution:
    """Parts of a sequence.

    Parameters
    ----------
    name : {"contiguous", "zigzag", "striped"}
        * contiguous: part p is ``[N p / P, N (p+1) / P)``.
        * zigzag: cut ``[0, N)`` into 2P chunks at ``N i / (2P)``; part p is the chunks p and
          ``2P-1-p``.  With row-major ranks it balances the causal mask on *every* grid: counted
          in chunk pairs, rank (r, c) of an R x C grid does ``C r + C - c - 1/2`` for its lower
          queries and ``C R + C (R-1-r) + c + 1/2`` for its upper ones, ``2 C R`` in all.
        * striped: part p is the tokens p, p+P, ... (Striped Attention, arXiv:2311.09431).
    seqlen : int
        N, the number of tokens.
    nshards : int
        P, the number of parts, one per rank.
    group : int
        Every `group` parts in succession are together one of the ``P / group`` parts of the same
        distribution without groups: of striped ones, part p is the tokens ``p // group +
        (p % group) P / group``, and every P-th after it; the others are so anyway.

    Raises
    ------
    ValueError
        For an unknown name, a negative seqlen, no parts, or groups that do not divide them.
    """

    name: str
    seqlen: int
    nshards: int
    group: int = 1

    def __post_init__(self) -> None:
        # NumPy's integers would overflow in the products below.
        object.__setattr__(self, "seqlen", int(self.seqlen))
        object.__setattr__(self, "nshards", int(self.nshards))
        if self.name not in DISTRIBUTIONS:
            raise ValueError(f"unknown distribution {self.name!r}; one of {DISTRIBUTIONS}")
        if self.seqlen < 0 or self.nshards < 1:
            raise ValueError(
                f"need seqlen >= 0 and nshards >= 1, got {self.seqlen} and {self.nshards}"
            )
        if self.group < 1 or self.nshards % self.group:
            raise ValueError(f"groups of {self.group} do not divide {self.nshards} parts")

    def _ranges(self, part: int) -> tuple[range, ...]:
        n, p = self.seqlen, self.nshards
        if not 0 <= part < p:
            raise ValueError(f"part {part} is not in [0, {p})")
        if self.name == "contiguous":
            return (range(n * part // p, n * (part + 1) // p),)
        if self.name == "striped":
            cell, place = divmod(part, self.group)
            return (range(cell + place * (p // self.group), n, p),)
        return tuple(
            range(n * i // (2 * p), n * (i + 1) // (2 * p)) for i in (part, 2 * p - 1 - part)
        )

    def tokens(self, part: int) -> np.ndarray:
        """Global indices of the tokens of `part`: sorted, (counts[part],) int64."""
        return np.concatenate([np.arange(r.start, r.stop, r.step) for r in self._ranges(part)])

    def count(self, part: int) -> int:
        """Number of tokens of `part`, without listing them."""
        return sum(map(len, self._ranges(part)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens of every part."""
        return tuple(self.count(p) for p in range(self.nshards))

    def slices(self, part: int) -> Iterator[tuple[slice, slice]]:
        """Pairs (slice of the part, slice of the sequence) that cover the part in few pieces."""
        done = 0
        for r in self._ranges(part):
            if len(r):
                yield slice(done, done + len(r)), slice(r.start, r.stop, r.step)
                done += len(r)
