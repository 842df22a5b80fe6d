"""Keys and values of requests, in blocks that are dealt to the ranks in turn.

All ranks keep the same table of who has which block, so that nothing has to be agreed upon: block
i of a request goes to the i-th rank after the request's first one, so that a cache grows evenly.
A rank that has no room borrows it from the one that has most (DistAttention, Lin et al.,
arXiv:2401.02669).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Request:
    """A request's place in the cache.

    Attributes
    ----------
    length : int
        Tokens in the cache.
    most : int
        Tokens that it may have in the end; room for them is set aside.
    owners : list of int
        Rank of each block.
    """

    length: int
    most: int
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
        self.requests[name] = Request(0, most)

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
        return [request.owners[x // self.block] for x in where]

    def release(self, name: int) -> None:
        """Forget a request."""
        for rank in self.requests.pop(name).owners:
            self.free[rank] += 1


class Cache:
    """The blocks of one rank.

    Parameters
    ----------
    table : Table
    rank : int
    shape : tuple of int
        (layers, heads of keys and values, headdim).
    dtype : dtype
    """

    def __init__(
        self, table: Table, rank: int, shape: tuple[int, int, int], dtype: np.typing.DTypeLike
    ) -> None:
        self.table, self._rank, self._shape, self._dtype = table, rank, shape, dtype
        self._blocks: dict[int, dict[int, np.ndarray]] = {}  # of requests, by place

    def put(self, layer: int, name: int, places: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Keep the keys and values, (n, Hkv, D), of tokens at these places of a request."""
        blocks = self._blocks.setdefault(name, {})
        layers, *heads = self._shape
        number, within = np.divmod(places, self.table.block)
        for i in np.unique(number):
            if i not in blocks:
                shape = layers, 2, self.table.block, *heads
                blocks[i] = np.zeros(shape, self._dtype)
            here = number == i
            blocks[i][layer, 0, within[here]] = k[here]
            blocks[i][layer, 1, within[here]] = v[here]

    def get(self, layer: int, name: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a request on this rank, (n, Hkv, D) each; any order will do."""
        length, found = self.table.requests[name].length, []
        for i, x in self._blocks.get(name, {}).items():
            found.append(x[layer, :, : max(0, length - i * self.table.block)])
        if not found:
            return (np.zeros((0, *self._shape[1:]), self._dtype),) * 2
        k, v = np.concatenate(found, axis=1)
        return k, v

    def release(self, name: int) -> None:
        """Free the memory of a request."""
        self._blocks.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks of this rank."""
        return sum(x.nbytes for of in self._blocks.values() for x in of.values())
