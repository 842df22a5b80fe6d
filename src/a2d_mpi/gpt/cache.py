"""The KV cache: keys and values of requests, in KV blocks that are dealt to the ranks in turn.

A KV block has the keys and values of some consecutive tokens of a request.  All ranks keep the
same table of the owners of KV blocks, so that they need not communicate about it.  All blocks of a
request are dealt when it is admitted.  Consecutive blocks go to consecutive ranks, so that a cache
grows evenly.  If a rank has no room, the rank with the most free room takes the block
(DistAttention, Lin et al., arXiv:2401.02669).  With a head axis, a "rank" of the table is a
Ulysses group.  Its ranks keep the same blocks, each for its share of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.layers import module_of


@dataclass
class Request:
    """The cache's record of a request.

    Attributes
    ----------
    max_tokens : int
        Tokens that the request may have in the end.
    owners : list of int
        Rank of each block, also of empty blocks.
    held : list of int
        Tokens that each rank keeps so far.
    length : int
        Tokens so far, of all ranks.
    """

    max_tokens: int
    owners: list[int]
    held: list[int]
    length: int = 0


class BlockTable:
    """The owners of the KV blocks of all requests; the same on each rank.

    Parameters
    ----------
    rooms : sequence of int
        Blocks for which each rank has room.
    block : int
        Tokens of a block.

    Attributes
    ----------
    free : list of int
        Free blocks of each rank.
    total : int
        Blocks of all ranks, free or not.

    Raises
    ------
    ValueError
        If `block` is not positive, there is no rank, or a room is negative.
    """

    def __init__(self, rooms: Sequence[int], block: int) -> None:
        if block < 1 or not rooms or min(rooms) < 0:
            raise ValueError(
                f"block must be at least 1 and no room below 0, got block {block} and rooms "
                f"{list(rooms)}"
            )
        self.block, self.free, self.total = block, list(rooms), sum(rooms)
        self.requests: dict[int, Request] = {}
        self._first = 0  # rank of the next request's first block; it moves on with each request

    def admit(self, name: int, max_tokens: int) -> bool:
        """Give a request all blocks that it may need; False if too few are free now.

        Raises
        ------
        ValueError
            If the request has been admitted already, or needs more blocks than there are.
        """
        needed, ranks = -(-max_tokens // self.block), len(self.free)
        if name in self.requests:
            raise ValueError(f"request {name} exists already")
        if needed > self.total:
            raise ValueError(
                f"request {name} needs {needed} blocks of {self.block} tokens for its "
                f"{max_tokens} tokens, but all ranks together have room for {self.total} blocks"
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
        self.requests[name] = Request(max_tokens, owners, [0] * ranks)
        return True

    def append(self, name: int, tokens: int) -> list[int]:
        """Add tokens to a request, not more than it may have; return the rank of each of them."""
        request = self.requests[name]
        places = range(request.length, request.length + tokens)
        ranks = [request.owners[x // self.block] for x in places]
        for rank in ranks:
            request.held[rank] += 1
        request.length = places.stop
        return ranks

    def release(self, name: int) -> None:
        """Forget a request, and free its blocks."""
        for rank in self.requests.pop(name).owners:
            self.free[rank] += 1


class Cache:
    """The keys and values that one rank keeps.

    The keys and values of a request and layer are contiguous.  The array of a request has room for
    all of its blocks.  It is allocated when the first keys and values come.

    Parameters
    ----------
    table : BlockTable
    rank : int
        Rank of the table.
    shape : tuple of int
        (layers, Hkv, D); Hkv is the number of KV heads that this rank keeps.
    like : array
        Array with the device and the dtype of keys and values.
    """

    def __init__(
        self, table: BlockTable, rank: int, shape: tuple[int, int, int], like: Array
    ) -> None:
        self.table, self.rank, self._shape, self._like = table, rank, shape, like
        self._kept: dict[int, Array] = {}  # by request: (layers, 2, Hkv, room, D)

    def put(self, layer: int, name: int, k: Array, v: Array) -> None:
        """Keep the keys and values, (n, Hkv, D), of this rank's latest n tokens of a request."""
        end = self.table.requests[name].held[self.rank]
        kept = self._array(name)
        for i, x in enumerate((k, v)):
            kept[layer, i, :, end - len(x) : end] = x.swapaxes(0, 1)

    def get(self, layer: int, name: int) -> Array:
        """Return a view of a request's keys and values on this rank, (2, Hkv, n, D)."""
        return self._array(name)[layer, :, :, : self.table.requests[name].held[self.rank]]

    def release(self, name: int) -> None:
        """Free the memory of a request."""
        self._kept.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's arrays."""
        return sum(x.nbytes for x in self._kept.values())

    def _array(self, name: int) -> Array:
        """Return the array of a request, with room for all of its blocks."""
        if name not in self._kept:
            layers, heads, headdim = self._shape
            room = self.table.requests[name].owners.count(self.rank) * self.table.block
            shape = layers, 2, heads, room, headdim
            self._kept[name] = module_of(self._like).zeros(shape, self._like.dtype)
        return self._kept[name]
