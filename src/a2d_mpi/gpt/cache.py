"""Keys and values of requests, in blocks that are dealt to the ranks in turn.

All ranks keep the same table of who has which block, so that nothing has to be agreed upon: block
i of a request goes to the i-th rank after the request's first one, so that a cache grows evenly.
A rank that has no room borrows it from the one that has most (DistAttention, Lin et al.,
arXiv:2401.02669).  With a head axis, a rank of the table is a Ulysses group, whose ranks keep the
same blocks, each its share of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.layers import module_of


@dataclass
class Request:
    """A request's place in the cache.

    Attributes
    ----------
    length : int
        Tokens in the cache.
    most : int
        Tokens that it may have in the end; room for them is set aside.
    held : list of int
        Of these, tokens that each rank keeps.
    owners : list of int
        Rank of each block.
    """

    length: int
    most: int
    held: list[int]
    owners: list[int] = field(default_factory=list)


class Table:
    """The blocks of all requests on all ranks; the same on each rank.

    Parameters
    ----------
    rooms : sequence of int
        Blocks for which each rank has room.
    block : int
        Tokens of a block.

    Attributes
    ----------
    free : list of int
        Blocks that each rank still has room for.
    total : int
        Blocks of all ranks.
    """

    def __init__(self, rooms: Sequence[int], block: int) -> None:
        if block < 1 or not rooms or min(rooms) < 0:
            raise ValueError(f"blocks of {block} tokens, and room for {list(rooms)} of them")
        self.block, self.free, self.total = block, list(rooms), sum(rooms)
        self.requests: dict[int, Request] = {}
        self._begun = 0

    def blocks(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.block)

    @property
    def unclaimed(self) -> int:
        """Blocks that no request has, or has set aside."""
        aside = sum(self.blocks(x.most) - len(x.owners) for x in self.requests.values())
        return sum(self.free) - aside

    def admit(self, name: int, most: int) -> None:
        """Set room aside for a request.

        Raises
        ------
        ValueError
            If there is not enough; all others go on.
        """
        needed = self.blocks(most)
        if name in self.requests:
            raise ValueError(f"request {name} is there already")
        if needed > self.unclaimed:
            raise ValueError(
                f"request {name} needs {needed} blocks of {self.block} tokens for its {most} "
                f"tokens; {self.unclaimed} are free on all {len(self.free)} ranks together"
            )
        self.requests[name] = Request(0, most, [0] * len(self.free))

    def append(self, name: int, tokens: int) -> list[int]:
        """Add tokens to a request; returns the rank that keeps each of them."""
        request = self.requests[name]
        if request.length + tokens > request.most:
            raise ValueError(f"request {name} has room for {request.most} tokens only")
        request.length += tokens
        while len(request.owners) * self.block < request.length:
            if not request.owners:  # requests begin on different ranks
                self._begun += 1
            first = request.owners[0] if request.owners else (self._begun - 1) % len(self.free)
            rank = (first + len(request.owners)) % len(self.free)
            if not self.free[rank]:
                rank = int(np.argmax(self.free))
            self.free[rank] -= 1
            request.owners.append(rank)
        where = range(request.length - tokens, request.length)
        ranks = [request.owners[x // self.block] for x in where]
        for rank in ranks:
            request.held[rank] += 1
        return ranks

    def release(self, name: int) -> None:
        """Forget a request."""
        for rank in self.requests.pop(name).owners:
            self.free[rank] += 1


class Cache:
    """Keys and values of the blocks of one rank, those of a request and layer side by side.

    Parameters
    ----------
    table : Table
    rank : int
        Of the table.
    shape : tuple of int
        (layers, Hkv, D); Hkv: heads of keys and values that are kept here.
    like : array
        Keys and values are on its device, of its dtype.
    """

    def __init__(self, table: Table, rank: int, shape: tuple[int, int, int], like: Array) -> None:
        self.table, self.rank, self._shape, self._like = table, rank, shape, like
        self._kept: dict[int, Array] = {}  # of requests: (layers, 2, Hkv, room, D)

    def put(self, layer: int, name: int, k: Array, v: Array) -> None:
        """Keep keys and values, (n, Hkv, D), of the last n tokens that are for this rank."""
        end = self.table.requests[name].held[self.rank]
        kept = self._with_room(name, end)
        for i, x in enumerate((k, v)):
            kept[layer, i, :, end - len(x) : end] = x.swapaxes(0, 1)

    def get(self, layer: int, name: int) -> Array:
        """Keys and values of a request on this rank, (2, Hkv, n, D): a view, not a copy."""
        kept = self._with_room(name, n := self.table.requests[name].held[self.rank])
        return kept[layer, :, :, :n]

    def release(self, name: int) -> None:
        """Free the memory of a request."""
        self._kept.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's arrays."""
        return sum(x.nbytes for x in self._kept.values())

    def _with_room(self, name: int, tokens: int) -> Array:
        """The array of a request, with room for so many tokens; it grows by a quarter at least."""
        had = self._kept.get(name)
        if had is not None and had.shape[3] >= tokens:
            return had
        (layers, heads, headdim), block = self._shape, self.table.block
        room = self.table.blocks(max(tokens, 0 if had is None else had.shape[3] * 5 // 4)) * block
        shape = layers, 2, heads, room, headdim
        made = module_of(self._like).zeros(shape, self._like.dtype)
        if had is not None:
            made[:, :, :, : had.shape[3]] = had
        self._kept[name] = made
        return made
