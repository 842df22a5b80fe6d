"""The KV cache of all ranks, and attention of decoding steps to it.

A KV block has the keys and values of some consecutive tokens of a request.  All ranks keep the
same table of the owners of KV blocks, so that they need not communicate about it.  All blocks of a
request are dealt when it is admitted.  Consecutive blocks go to consecutive ranks, so that a cache
grows evenly.  If a rank has no room, the rank with the most free room takes the block
(DistAttention, Lin et al., arXiv:2401.02669).  With a head axis, a "rank" of the table is a
Ulysses group.  Its ranks keep the same blocks, each for its share of the heads.

In a decoding step there is one row for each request.  Each rank attends to the KV blocks that it
keeps.  The partial results are merged in two exchanges (Helix, Bhatia et al., arXiv:2507.07120).
In the first, every rank receives the partial results of its share of the heads, and merges them.
In the second, all ranks receive all merged heads.  With a head axis, partial results are merged
inside a context-parallel group.  The bytes of a step do not depend on the length of the context.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.exchange import ArrayExchange
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


class SpreadAttention:
    """Attention of a decoding step, layer after layer: a model uses it as a plan.  Collective.

    Parameters
    ----------
    grid : ProcessGrid
    config : GPTConfig
    cache : Cache
    exchanges : list of ArrayExchange
        Of the context-parallel group, and of all ranks.

    Attributes
    ----------
    heads_kv : slice
        KV heads that this rank keeps.
    seconds : dict of str to float
        Seconds so far: "attention" (to this rank's KV blocks) and "merge" (exchanges and sums).
        On a GPU these are seconds of the host.
    tokens : (requests,) int64
        Positions of the rows.
    """

    def __init__(
        self, grid: ProcessGrid, config: GPTConfig, cache: Cache, exchanges: list[ArrayExchange]
    ) -> None:
        self._grid, self._cache, (self._context, self._everyone) = grid, cache, exchanges
        self.heads_kv = heads_kv_of(config, grid.heads, grid.head)
        self.seconds = {"attention": 0.0, "merge": 0.0}

    def begin(self, names: Sequence[int], positions: np.ndarray, owners: Sequence[int]) -> None:
        """Begin a step of requests.

        Parameters
        ----------
        names : sequence of int
            Requests.
        positions : (requests,) int64
            Position of each request's new token.
        owners : sequence of int
            Rank, in the block table, that keeps each request's new keys and values.
        """
        self._names, self.tokens, self._owners, self._layer = names, positions, owners, 0

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        """Keep new keys and values if they are for this rank, and attend to all; no lse."""
        layer, own = self._layer, self.heads_kv
        self._layer += 1
        for i, (name, owner) in enumerate(zip(self._names, self._owners)):
            if owner == self._cache.rank:
                self._cache.put(layer, name, k[i : i + 1, own], v[i : i + 1, own])
        return self.attend(layer, self._names, q), None

    def attend(self, layer: int, names: Sequence[int], q: Array) -> Array:
        """Compute attention of one row of each request to all its keys, (requests, H, D)."""
        start = time.perf_counter()
        partial = self._partial(layer, names, q)
        middle = time.perf_counter()
        out = self._merged(partial, q.shape[1])
        self.seconds["attention"] += middle - start
        self.seconds["merge"] += time.perf_counter() - middle
        return out

    def _partial(self, layer: int, names: Sequence[int], q: Array) -> Array:
        """Compute out and lse of this rank's heads over its KV blocks.

        Returns
        -------
        (ranks of the context-parallel group, requests, share of the heads, D + 1) array
            lse is the last element.  All shares have the same length, so the last is padded.
        """
        xp, (b, h, d), ranks = module_of(q), q.shape, self._context.comm.size
        own, heads_kv = h // self._grid.heads, self.heads_kv.stop - self.heads_kv.start
        first, share = self._grid.head * own, -(-own // ranks)
        rows = (q[:, first : first + own] * d**-0.5).reshape(b, heads_kv, own // heads_kv, d)
        results = xp.zeros((b, ranks * share, d + 1), q.dtype)
        results[:, :own, d] = -np.inf
        for i, name in enumerate(names):
            k, v = self._cache.get(layer, name)  # (Hkv, n, D)
            if k.shape[1]:
                out, lse = attention(rows[i], k, v)
                results[i, :own, :d], results[i, :own, d] = out.reshape(own, d), lse.reshape(own)
        return xp.ascontiguousarray(results.reshape(b, ranks, share, d + 1).swapaxes(0, 1))

    def _merged(self, given: Array, heads: int) -> Array:
        """Merge the partial results of a context-parallel group; return all heads on all ranks."""
        xp, (ranks, b, share, d) = module_of(given), given.shape
        d, axis = d - 1, self._grid.heads
        received = xp.empty_like(given)  # (ranks, B, share, D + 1): this rank's share of the heads
        self._context.wait(self._context.all_to_all(given, received))
        weights = received[..., d] - received[..., d].max(axis=0)
        weights = xp.exp(weights)  # (ranks, B, share)
        merged = (weights[..., None] * received[..., :d]).sum(axis=0)
        merged = merged / weights.sum(axis=0)[..., None]  # (B, share, D)
        joined = xp.empty((ranks * axis, *merged.shape), given.dtype)
        self._everyone.wait(self._everyone.all_gather(merged, joined))
        # The ranks of a context-parallel group divide its heads: put these next to each other.
        joined = joined.reshape(ranks, axis, b, share, d).transpose(2, 1, 0, 3, 4)
        joined = xp.ascontiguousarray(joined).reshape(b, axis, ranks * share, d)
        return xp.ascontiguousarray(joined[:, :, : heads // axis]).reshape(b, heads, d)


def heads_kv_of(config: GPTConfig, ranks: int, rank: int) -> slice:
    """Return the KV heads that the queries of rank `rank` of a head axis of `ranks` ranks read."""
    group, own = config.nheads // config.nheads_kv, config.nheads // ranks
    first = rank * own // group
    return slice(first, first + -(-own // group))


def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Compute attention of one row of scaled queries, (Hkv, group, D), to k and v, (Hkv, n, D).

    The kernels are made for many queries.  For one query and 16384 keys of 8 heads of 64 (AMD
    EPYC), the NumPy kernel takes 43 ms.  The two products here take 5 ms, as long as reading the
    keys and values.
    """
    xp = module_of(q)
    s = q @ k.swapaxes(1, 2)  # (Hkv, group, n)
    largest = s.max(axis=2, keepdims=True)
    p = xp.exp(s - largest)
    total = p.sum(axis=2, keepdims=True)  # (Hkv, group, 1)
    return (p @ v) / total, xp.log(total) + largest


def step_traffic(
    config: GPTConfig, positions: int, heads: int, requests: int, itemsize: int
) -> tuple[int, int]:
    """Return the bytes and messages that a rank sends in a decoding step.

    They do not depend on the length of the context.

    Parameters
    ----------
    config : GPTConfig
    positions, heads : int
        R C and U of the grid.
    requests : int
    itemsize : int
        Bytes of an element.
    """
    share = -(-config.nheads // heads // positions)  # heads whose results a rank merges
    others, all_others = positions - 1, positions * heads - 1
    elements = requests * share * (others * (config.headdim + 1) + all_others * config.headdim)
    return config.layers * elements * itemsize, config.layers * (others + all_others)
