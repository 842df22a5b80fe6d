"""Attention of decoding steps: one row for each request, keys and values spread over all ranks.

Each rank attends to the KV blocks that it keeps.  The partial results are merged in two exchanges
(Helix, Bhatia et al., arXiv:2507.07120).  In the first, every rank receives the partial results of
its share of the heads, and merges them.  In the second, all ranks receive all merged heads.  With
a head axis, the ranks of a Ulysses group keep the same KV blocks, each for its share of the heads.
Partial results are then merged inside a context-parallel group.  The bytes of a step do not depend
on the length of the context.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.cache import Cache
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.exchange import ArrayExchange
from a2d_mpi.gpt.layers import module_of


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
