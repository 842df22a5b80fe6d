"""Attention of decoding steps: a row for each request, keys and values spread over all ranks.

Each rank attends to the blocks that it keeps, and the partial results are merged where they are
needed (Helix, Bhatia et al., arXiv:2507.07120): first every rank gets its share of the heads from
all others, then all get all heads.  With a head axis, the ranks of a Ulysses group keep the same
blocks, each its share of the heads, and partial results are merged inside a context-parallel
group.  The bytes of a step do not depend on the length of the context.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from a2d_mpi.comm.channel import Traffic
from a2d_mpi.comm.grid import ProcessGrid
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.gpt.cache import Cache
from a2d_mpi.gpt.config import GPTConfig
from a2d_mpi.gpt.exchange import Exchange
from a2d_mpi.gpt.layers import module_of


class SpreadAttention:
    """Attention of a decoding step, layer after layer; the `Attention` of a model.  Collective.

    Parameters
    ----------
    grid : ProcessGrid
    config : GPTConfig
    cache : Cache
    traffic : Traffic
        Counts messages of phase "decode".
    device : Device
    transfers : {"auto", "device", "host"}

    Attributes
    ----------
    heads_kv : slice
        Heads of keys and values that this rank keeps.
    seconds : dict of str to float
        So far, by "attention" (to this rank's blocks), of these "cpu" (also where ranks share
        cores), and "merge" (exchanges and sums).  On a GPU: of the host.
    tokens : (requests,) int64
        Positions of the rows.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        config: GPTConfig,
        cache: Cache,
        traffic: Traffic,
        device: Device,
        transfers: str,
    ) -> None:
        self._grid, self._cache = grid, cache
        self.heads_kv = heads_kv_of(config, grid.heads, grid.head)
        way = traffic, device, transfers, grid.failures
        self._merging = Exchange(grid.group_comm, "decode", "context", *way)
        self._joining = Exchange(grid.comm, "decode", "all", *way)
        self.seconds = {"attention": 0.0, "cpu": 0.0, "merge": 0.0}

    def begin(self, names: Sequence[int], positions: np.ndarray, owners: Sequence[int]) -> None:
        """Begin a step of requests; `owners` keep the new keys and values."""
        self._names, self.tokens, self._owners, self._layer = names, positions, owners, 0

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        """Keep new keys and values, and attend."""
        layer, own = self._layer, self.heads_kv
        self._layer += 1
        for i, (name, owner) in enumerate(zip(self._names, self._owners)):
            if owner == self._cache.rank:
                self._cache.put(layer, name, k[i : i + 1, own], v[i : i + 1, own])
        return self.attend(layer, self._names, q), None

    @property
    def exchanges(self) -> list[Exchange]:
        """The ways of the messages."""
        return [self._merging, self._joining]

    def free(self) -> None:
        """Free the communicators.  Collective, also after a loss."""
        for x in self.exchanges:
            x.free()

    def attend(self, layer: int, names: Sequence[int], q: Array) -> Array:
        """Attention of a row for each request to all its keys, (requests, H, D)."""
        start, cpu = time.perf_counter(), time.thread_time()
        whole = self._partial(layer, names, q)
        self.seconds["cpu"] += time.thread_time() - cpu
        middle = time.perf_counter()
        found = self._merged(whole, q.shape[1])
        self.seconds["attention"] += middle - start
        self.seconds["merge"] += time.perf_counter() - middle
        return found

    def _partial(self, layer: int, names: Sequence[int], q: Array) -> Array:
        """Out and lse of this rank's heads over its blocks, (context ranks, B, share, D + 1).

        Shares of the heads are as long for all ranks of the context-parallel group: the last may
        be padded.
        """
        xp, (b, h, d), ranks = module_of(q), q.shape, self._merging.comm.size
        own, heads_kv = h // self._grid.heads, self.heads_kv.stop - self.heads_kv.start
        first, share = self._grid.head * own, -(-own // ranks)
        rows = (q[:, first : first + own] * d**-0.5).reshape(b, heads_kv, own // heads_kv, d)
        whole = xp.zeros((b, ranks * share, d + 1), q.dtype)
        whole[:, :own, d] = -np.inf
        for i, name in enumerate(names):
            k, v = self._cache.get(layer, name)  # (Hkv, n, D)
            if k.shape[1]:
                out, lse = attention(rows[i], k, v)
                whole[i, :own, :d], whole[i, :own, d] = out.reshape(own, d), lse.reshape(own)
        return xp.ascontiguousarray(whole.reshape(b, ranks, share, d + 1).swapaxes(0, 1))

    def _merged(self, given: Array, heads: int) -> Array:
        """Merge the partial results of a context-parallel group, rank after rank, for all."""
        xp, (ranks, b, share, d) = module_of(given), given.shape
        d, axis = d - 1, self._grid.heads
        received = xp.empty_like(given)  # (context ranks, B, share, D + 1): of this rank's heads
        self._merging.wait(self._merging.all_to_all(given, received))
        weights = received[..., d] - received[..., d].max(axis=0)
        weights = xp.exp(weights)  # (context ranks, B, share)
        merged = (weights[..., None] * received[..., :d]).sum(axis=0)
        merged = merged / weights.sum(axis=0)[..., None]  # (B, share, D)
        whole = xp.empty((ranks * axis, *merged.shape), given.dtype)
        self._joining.wait(self._joining.all_gather(merged, whole))
        # The heads of a context-parallel group are shared out among its ranks.
        whole = whole.reshape(ranks, axis, b, share, d).transpose(2, 1, 0, 3, 4)
        whole = xp.ascontiguousarray(whole).reshape(b, axis, ranks * share, d)
        return xp.ascontiguousarray(whole[:, :, : heads // axis]).reshape(b, heads, d)


def heads_kv_of(config: GPTConfig, ranks: int, rank: int) -> slice:
    """Heads of keys and values that the queries of one of the ranks of a head axis see."""
    group, own = config.nheads // config.nheads_kv, config.nheads // ranks
    first = rank * own // group
    return slice(first, first + -(-own // group))


def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Attention of one row of scaled queries, (Hkv, group, D), to all of k and v, (Hkv, n, D).

    The kernels are made for many queries.  For one and 16384 keys of 8 heads of 64 (AMD EPYC) the
    NumPy kernel takes 43 ms, these two products 5, as long as reading the keys and values.
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
    """Bytes and messages that a rank sends in a decoding step, whatever the length of the context.

    Parameters
    ----------
    config : GPTConfig
    positions, heads : int
        R C and U of the grid.
    requests : int
    itemsize : int
        Bytes of an element.
    """
    share = -(-config.nheads // heads // positions)  # heads of which a rank merges the results
    others, all_others = positions - 1, positions * heads - 1
    elements = requests * share * (others * (config.headdim + 1) + all_others * config.headdim)
    return config.layers * elements * itemsize, config.layers * (others + all_others)
