"""Keys and values of requests, in blocks that are dealt to the ranks in turn.

All ranks keep the same table of who has which block, so that nothing has to be agreed upon.  All
blocks of a request are dealt when it is admitted: block i goes to the i-th rank after the
request's first one, so that a cache grows evenly.  A rank that has no room borrows it from the one
that has most (DistAttention, Lin et al.,
arXiv:2401.02669).  With a head axis, a rank of the table is a Ulysses group, whose ranks keep the
same blocks, each its share of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.layers import module_of


@dataclass
class Request:
    """A request's place in the cache.

    Attributes
    ----------
    most : int
        Tokens that it may have in the end.
    owners : list of int
        Rank of each block, also of those that are still empty.
    held : list of int
        Tokens that each rank keeps so far.
    length : int
        Tokens so far, of all ranks.
    """

    most: int
    owners: list[int]
    held: list[int]
    length: int = 0


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
        Blocks of each rank that no request has.
    total : int
        Blocks of all ranks.
    """

    def __init__(self, rooms: Sequence[int], block: int) -> None:
        if block < 1 or not rooms or min(rooms) < 0:
            raise ValueError(f"blocks of {block} tokens, and room for {list(rooms)} of them")
        self.block, self.free, self.total = block, list(rooms), sum(rooms)
        self.requests: dict[int, Request] = {}
        self._first = 0  # rank of the next request's first block: another one for each

    def blocks(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.block)

    def admit(self, name: int, most: int) -> bool:
        """Give a request blocks for as many tokens as it may have; False if others have them now.

        Raises
        ------
        ValueError
            If there would not be enough even if there were no others.
        """
        needed, ranks = self.blocks(most), len(self.free)
        if name in self.requests:
            raise ValueError(f"request {name} is there already")
        if needed > self.total:
            raise ValueError(
                f"request {name} needs {needed} blocks of {self.block} tokens for its {most} "
                f"tokens; all {ranks} ranks together have room for {self.total}"
            )
        if needed > sum(self.free):
            return False
        owners: list[int] = []
        for i in range(needed):
            rank = (self._first + i) % ranks
            if not self.free[rank]:
                rank = int(np.argmax(self.free))
            self.free[rank] -= 1
            owners.append(rank)
        self._first = (self._first + 1) % ranks
        self.requests[name] = Request(most, owners, [0] * ranks)
        return True

    def append(self, name: int, tokens: int) -> list[int]:
        """Add tokens to a request; returns the rank that keeps each of them."""
        request = self.requests[name]
        end = request.length + tokens
        if end > request.most:
            raise ValueError(f"request {name} has room for {request.most} tokens only")
        ranks = [request.owners[x // self.block] for x in range(request.length, end)]
        for rank in ranks:
            request.held[rank] += 1
        request.length = end
        return ranks

    def release(self, name: int) -> None:
        """Forget a request."""
        for rank in self.requests.pop(name).owners:
            self.free[rank] += 1


class Cache:
    """Keys and values of the blocks of one rank, those of a request and layer side by side.

    A request's array is made when its first keys and values come, for all of its blocks.

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
        kept = self._array(name)
        for i, x in enumerate((k, v)):
            kept[layer, i, :, end - len(x) : end] = x.swapaxes(0, 1)

    def get(self, layer: int, name: int) -> Array:
        """Keys and values of a request on this rank, (2, Hkv, n, D): a view, not a copy."""
        return self._array(name)[layer, :, :, : self.table.requests[name].held[self.rank]]

    def release(self, name: int) -> None:
        """Free the memory of a request."""
        self._kept.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's arrays."""
        return sum(x.nbytes for x in self._kept.values())

    def _array(self, name: int) -> Array:
        """The array of a request, with room for all of its blocks."""
        if name not in self._kept:
            layers, heads, headdim = self._shape
            room = self.table.requests[name].owners.count(self.rank) * self.table.block
            shape = layers, 2, heads, room, headdim
            self._kept[name] = module_of(self._like).zeros(shape, self._like.dtype)
        return self._kept[name]
