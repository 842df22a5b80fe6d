"""Tokens of a shard that the mask lets meet tokens of other shards: those that have to travel.

A query *meets* the keys that it sees, and a key the queries that see it.  What a rank sends,
receives and returns of a shard are the tokens that meet those of the shards on the other side of
its tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from a2d_mpi.core.distribution import Distribution
from a2d_mpi.core.masks import Causal, Full, Mask

Ranks = int | np.ndarray  # a rank, or one for each rank

# Pieces of a shard, beyond which those of all shards are counted as if all of it met the others:
# shards as scattered as striped ones meet nearly everything.
MOST_PIECES = 64
# Members of all ranks' different sets of others, beyond which these are not counted either; the
# rows, or columns, of a grid have as many as there are ranks.
MOST_MEMBERS = 1 << 12


class Around(NamedTuple):
    """So many ranks from the first one on, in rings of `ring` ranks: after its last its first."""

    first: Ranks
    number: int
    ring: int


Others = tuple[Ranks, ...] | Around


def size(edges: np.ndarray) -> int:
    """Number of tokens in runs, given where each begins and ends."""
    if len(edges) == 2:  # mostly
        return int(edges[1] - edges[0])
    return int((edges[1::2] - edges[::2]).sum())


def is_none(others: Others) -> bool:
    """Tell whether there are no others."""
    return not (others.number if isinstance(others, Around) else others)


@lru_cache(maxsize=8)
def meetings(mask: Mask, queries: Distribution, keys: Distribution) -> Meetings | None:
    """The meetings of the shards of queries and keys; None if all tokens meet.  Remembered."""
    return None if type(mask) is Full else Meetings(mask, queries, keys)


class Meetings:
    """Meetings of all shards of queries with all shards of keys.

    Parameters
    ----------
    mask : Mask
    queries, keys : Distribution
        Of as many shards.
    """

    def __init__(self, mask: Mask, queries: Distribution, keys: Distribution) -> None:
        self._mask, self._shards = mask, (queries, keys)
        self._met: dict[tuple[bool, int], np.ndarray] = {}
        self._places: dict[tuple[bool, int, tuple[int, ...]], np.ndarray] = {}
        self._pieces: dict[bool, _Pieces] = {}
        self._visible: np.ndarray | None = None

    def places(self, of_keys: bool, owner: int, others: Others) -> np.ndarray:
        """Runs of the owner's tokens that meet the others' shards.

        Parameters
        ----------
        of_keys : bool
            Whether the owner's tokens are keys, and the others' queries, or the other way round.
        owner : int
        others : tuple of int, or Around

        Returns
        -------
        (2 runs,) int64
            Places in the shard where each run begins and ends.
        """
        members = tuple(sorted(set(self._listed(others))))
        key = of_keys, owner, members
        if key not in self._places:
            tokens = self._shards[of_keys].tokens(owner)
            met = _union([self._runs(of_keys, p) for p in members])
            meets = np.searchsorted(met, tokens, side="right") % 2 == 1
            self._places[key] = run_edges(np.append(meets, False))
        return self._places[key]

    def count(self, of_keys: bool, owner: Ranks, others: Others) -> Ranks:
        """Number of these tokens, for an owner or for one of every rank.

        Of every rank's it is exact if no shard has more than `MOST_PIECES` pieces that the mask
        tells apart, and the others are not too many (`MOST_MEMBERS`); else the whole shards.
        """
        if np.ndim(owner) == 0:
            several = [] if isinstance(others, Around) else [x for x in others if np.ndim(x)]
            if not several:
                return size(self.places(of_keys, owner, others))
            owner = np.full_like(several[0], owner)  # one owner, whose others differ by rank
        if of_keys not in self._pieces:
            runs = [self._runs(of_keys, p) for p in range(self._shards[0].nshards)]
            self._pieces[of_keys] = _Pieces(self._shards[of_keys], runs)
        return self._pieces[of_keys].count(owner, others)

    def _listed(self, others: Others) -> Sequence[int]:
        if isinstance(others, Around):
            begin = others.first // others.ring * others.ring
            return [begin + (others.first + i) % others.ring for i in range(others.number)]
        return others

    def _runs(self, of_keys: bool, shard: int) -> np.ndarray:
        """Begin and end of each run of tokens that meet a shard of the other side, in order."""
        key = of_keys, shard
        if key not in self._met:
            self._met[key] = self._keys_of(shard) if of_keys else self._queries_of(shard)
        return self._met[key]

    def _keys_of(self, shard: int) -> np.ndarray:
        """Keys that queries of a shard see."""
        n, tokens = self._shards[1].seqlen, self._shards[0].tokens(shard)
        if type(self._mask) is Causal:  # the others see no more than the last one
            return _run(0, max(self._mask.visible(tokens[-1:])[0][1], default=0), n)
        edges = np.zeros(n + 2, np.int64)
        for begin, end in self._mask.visible(tokens):
            begin, end = (np.clip(x, 0, n) for x in (begin, end))
            seen = end > begin
            np.add.at(edges, begin[seen], 1)
            np.add.at(edges, end[seen], -1)
        return run_edges(np.cumsum(edges[:-1]) > 0)

    def _queries_of(self, shard: int) -> np.ndarray:
        """Queries that see keys of a shard."""
        (n, nk), tokens = (x.seqlen for x in self._shards), self._shards[1].tokens(shard)
        if type(self._mask) is Causal:  # who sees others sees the first one, too
            least = tokens[:1] + 1 - self._mask.visible(np.zeros(1, np.int64))[0][1]
            return _run(min(least, default=n), n, n)
        if self._visible is None:
            found = self._mask.visible(np.arange(n))
            self._visible = np.array(found).clip(0, nk)  # (intervals, 2, n)
        before = np.zeros(nk + 1, np.int32)
        before[tokens + 1] = 1
        before = np.cumsum(before, dtype=np.int32)
        meets = np.zeros(n + 1, bool)
        for begin, end in self._visible:
            meets[:-1] |= before[end] > before[begin]
        return run_edges(meets)


def _run(begin: int, end: int, n: int) -> np.ndarray:
    """Begin and end of one run, as far as it is inside [0, n)."""
    begin, end = max(0, begin), min(end, n)
    return np.array([begin, end] if begin < end else [], np.int64)


def run_edges(covered: np.ndarray) -> np.ndarray:
    """Begin and end of each run of true elements; the last element is false."""
    return np.flatnonzero(np.diff(covered, prepend=False))


def _union(runs: Sequence[np.ndarray]) -> np.ndarray:
    """Begin and end of each run of numbers that are in any of several sets of runs."""
    if len(runs) == 1:
        return runs[0]
    begins, ends = (np.sort(np.concatenate([x[i::2] for x in runs])) for i in (0, 1))
    # A run begins where all that began before it have ended, and the same backwards.
    first = np.ones(len(begins), bool)
    first[1:] = begins[1:] > ends[:-1]
    return np.stack([begins[first], ends[np.roll(first, -1)]], axis=1).ravel()


class _Pieces:
    """Shards cut into pieces that meet each shard of the other side as a whole, or not at all."""

    def __init__(self, shards: Distribution, runs: list[np.ndarray]) -> None:
        found = [[x for x in shards.runs(p) if x] for p in range(shards.nshards)]
        ends = [y for x in found for r in x for y in (r.start, r[-1] + 1)]
        edges = np.unique(np.concatenate([[0, shards.seqlen], *runs, ends]).astype(np.int64))
        meets = [np.searchsorted(x, edges[:-1], side="right") % 2 for x in runs]
        self._meets = np.array(meets, bool).reshape(len(runs), -1)  # (shards, pieces)
        # How many of all ranks before one meet a piece.
        self._before = np.zeros((len(runs) + 1, self._meets.shape[1]), np.int32)
        self._before[1:] = np.cumsum(self._meets, axis=0)
        which, sizes = [], []
        for x in found:
            for r in x:
                first, last = np.searchsorted(edges, (r.start, r[-1] + 1))
                cuts = -(-(edges[first : last + 1] - r.start) // r.step)
                which.append(np.arange(first, last))
                sizes.append(np.diff(cuts))
        counts = np.cumsum([0, *map(len, found)])
        most = max(sum(map(len, which[a:b])) for a, b in zip(counts, counts[1:]))
        self._whole = np.array(shards.counts)
        self.exact = most <= MOST_PIECES
        random = np.random.default_rng(0)
        self._numbers = random.integers(1 << 40, size=len(runs))
        self._known: dict[tuple[int, ...], tuple[Others, np.ndarray | None]] = {}
        self._rows: dict[int, int] = {}
        self._of_sets = np.zeros((64, len(runs)), np.int64)
        if self.exact:
            self._which, self._sizes = np.zeros((2, shards.nshards, most), np.int64)
            for p, (a, b) in enumerate(zip(counts, counts[1:])):
                if a < b:
                    own = np.concatenate(which[a:b])
                    self._which[p, : len(own)] = own
                    self._sizes[p, : len(own)] = np.concatenate(sizes[a:b])

    def count(self, owner: np.ndarray, others: Others) -> np.ndarray:
        """Tokens of each owner that meet others."""
        if not self.exact:
            return self._whole[owner]
        if isinstance(others, Around):
            which = self._which[owner]  # (P, pieces of a shard)
            first = np.asarray(others.first)[:, None]
            begin = first // others.ring * others.ring
            end = np.minimum(first + others.number, begin + others.ring)
            again = begin + first + others.number - end  # past the end of the ring
            before = [self._before[x, which] for x in (first, end, begin, again)]
            meets = (before[1] > before[0]) | (before[3] > before[2])
            return (self._sizes[owner] * meets).sum(axis=1)
        sets = self._sets(others)
        return self._whole[owner] if sets is None else self._of_sets[sets, owner]

    def _sets(self, others: tuple[np.ndarray, ...]) -> np.ndarray | None:
        """Each rank's set of others, by its row in `_of_sets`; None if they are too many."""
        key = tuple(map(id, others))
        if key not in self._known:
            # The same members have the same sum of random numbers.
            numbers, first, which = np.unique(
                sum(self._numbers[p] for p in others), return_index=True, return_inverse=True
            )
            rows = None
            if len(first) * len(others) <= max(len(self._meets), MOST_MEMBERS):
                rows = np.array([self._row(int(x), others, i) for x, i in zip(numbers, first)])
                rows = rows[which]
            self._known[key] = others, rows  # kept with them: no others get the same id
        return self._known[key][1]

    def _row(self, number: int, others: tuple[np.ndarray, ...], rank: int) -> int:
        """Row of a rank's set of others in `_of_sets`, whose elements are tokens of each owner."""
        if number not in self._rows:
            meets = self._meets[[p[rank] for p in others]].any(axis=0)
            found = (self._sizes * meets[self._which]).sum(axis=1)
            self._rows[number] = len(self._rows)
            if len(self._of_sets) < len(self._rows):
                self._of_sets = np.concatenate([self._of_sets, np.zeros_like(self._of_sets)])
            self._of_sets[self._rows[number]] = found
        return self._rows[number]
