"""Tokens for heads: what the ranks of a cell exchange before and after a layer's attention.

Before, a rank has some tokens and all heads; after, all tokens of its cell and 1/U of the heads
(DeepSpeed-Ulysses, arXiv:2309.14509).  Key heads fewer than ranks are copied to those that need
them.  Messages go from rank to rank, all tensors in one: MPI's all-to-all does not take device
memory everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from a2d_mpi.attention.engine import Engine
from a2d_mpi.comm.channel import Channel
from a2d_mpi.devices.protocol import Array


class HeadExchange:
    """The exchange inside one cell.

    Parameters
    ----------
    channel : Channel
        Of the ranks of the cell, U of them.
    tokens : sequence of (n,) int64
        Tokens of each.
    nheads, nheads_kv : int
        Of the whole problem; see `a2d_mpi.core.sizes.misfit` for what can be shared out.

    Attributes
    ----------
    channel
    tokens : (n,) int64
        Sorted tokens of the cell.
    nheads, nheads_kv : int
        Of each layer.
    shared : bool
        Whether layers share key heads, so that the gradients of these are sums.
    """

    _TAG = 0

    def __init__(
        self, channel: Channel, tokens: Sequence[np.ndarray], nheads: int, nheads_kv: int
    ) -> None:
        self.channel = channel
        size, group = channel.size, nheads // nheads_kv
        self._counts = [len(x) for x in tokens]
        everything = np.concatenate(tokens)
        self.tokens = np.sort(everything)
        self._places = [np.searchsorted(self.tokens, x) for x in tokens]
        self._whole = nheads, nheads_kv
        self.nheads, self.nheads_kv = nheads // size, max(1, nheads_kv // size)
        self.shared = nheads_kv < size
        self._first = [u * self.nheads for u in range(size)]
        self._first_kv = [u * self.nheads // group for u in range(size)]

    def share(self, engine: Engine, tensors: Mapping[str, Array]) -> list[Array]:
        """My layer's heads of all tokens of the cell, from all heads of my tokens.

        Arrays are (n, heads, headdim), or (n, heads) for statistics; what is returned lies in
        buffers, unless a cell is one rank, which shares with nobody.
        """
        if self.channel.size == 1:
            return list(tensors.values())
        channel, device, me = self.channel, engine.device, self.channel.rank
        xs = {name: _three(x) for name, x in tensors.items()}
        arriving = {u: self._buffers(engine, "arriving", xs, u, me) for u in range(channel.size)}
        receives = {u: channel.irecv([arriving[u][0]], u, self._TAG) for u in channel.peers}
        sends: list[Any] = []
        for u in (*channel.peers, me):
            # My own go the way of all others, without a message.
            parcel, leaving = (
                arriving[u] if u == me else self._buffers(engine, "leaving", xs, me, u)
            )
            with engine.clock("merge"):
                for to, (name, x) in zip(leaving, xs.items(), strict=True):
                    device.take_heads(to, x, self._first_head(name, u))
            if u != me:
                sends += channel.isend([parcel], u, self._TAG)
        cell = [
            engine.work.get(("cell", name), (len(self.tokens), *y.shape[1:]), y.dtype)
            for name, y in zip(xs, arriving[me][1], strict=True)
        ]
        for u in (me, *channel.peers):
            channel.wait(receives.get(u, []))
            with engine.clock("merge"):
                for to, x in zip(cell, arriving[u][1], strict=True):
                    device.put_at(to, x, engine.upload(self._places[u]))
        channel.wait(sends)
        return [x if tensors[name].ndim == 3 else x.reshape(x.shape[:2])
                for name, x in zip(tensors, cell, strict=True)]  # fmt: skip

    def collect(
        self,
        engine: Engine,
        tensors: Mapping[str, Array],
        dtypes: Mapping[str, np.dtype],
        in_buffers: Sequence[str] = (),
    ) -> list[Array]:
        """All heads of my tokens, from my layer's heads of all tokens of the cell.

        Parameters
        ----------
        engine : Engine
        tensors : dict of arrays
            Of the layer: (cell tokens, heads, headdim), or (cell tokens, heads).
        dtypes : dict of dtype
            Of the results.  They travel in it, but what the owner sums as it is.
        in_buffers : sequence of str
            Tensors that lie in buffers, which what is returned must not.

        Returns
        -------
        list of new arrays (n, heads, headdim) or (n, heads)
        """
        if self.channel.size == 1:
            return [
                self._copied(engine, x, dtypes[name])
                if x.dtype != dtypes[name] or name in in_buffers
                else x
                for name, x in tensors.items()
            ]
        channel, device, me = self.channel, engine.device, self.channel.rank
        xs = {name: _three(x) for name, x in tensors.items()}
        n = self._counts[me]
        for name, x in xs.items():
            if x.dtype != dtypes[name] and not self._is_sum(name):
                xs[name] = engine.work.get(("rounded", name), x.shape, dtypes[name])
                with engine.clock("merge"):
                    device.put(xs[name], x)

        def buffers(key: str, u: int, tokens: int) -> tuple[Array, list[Array]]:
            like = [((tokens, *x.shape[1:]), x.dtype) for x in xs.values()]
            return engine.work.parcel((key, u), like)

        arriving = {u: buffers("returning", u, n) for u in range(channel.size)}
        receives = {u: channel.irecv([arriving[u][0]], u, self._TAG + 8) for u in channel.peers}
        sends: list[Any] = []
        for u in (*channel.peers, me):
            parcel, leaving = arriving[u] if u == me else buffers("returned", u, self._counts[u])
            with engine.clock("merge"):
                for to, x in zip(leaving, xs.values(), strict=True):
                    device.take(to, x, engine.upload(self._places[u]))
            if u != me:
                sends += channel.isend([parcel], u, self._TAG + 8)
        results = {
            name: device.empty((n, self._whole_heads(name), x.shape[2]), x.dtype)
            for name, x in xs.items()
        }
        for name, x in results.items():
            if self._is_sum(name):
                device.zero(x)
        for u in range(channel.size):  # in this order: sums repeat bit for bit
            channel.wait(receives.get(u, []))
            with engine.clock("merge"):
                for name, x in zip(xs, arriving[u][1], strict=True):
                    first = self._first_head(name, u)
                    device.put_heads(results[name], x, first, add=self._is_sum(name))
        channel.wait(sends)
        found = []
        for name, x in results.items():
            if x.dtype != dtypes[name]:
                x = self._copied(engine, x, dtypes[name])
            found.append(x if tensors[name].ndim == 3 else x.reshape(x.shape[:2]))
        return found

    @staticmethod
    def _copied(engine: Engine, x: Array, dtype: np.dtype) -> Array:
        to = engine.device.empty(x.shape, dtype)
        with engine.clock("merge"):
            engine.device.put(to, x)
        return to

    def _is_sum(self, name: str) -> bool:
        return self.shared and name in ("dk", "dv")

    def _first_head(self, name: str, u: int) -> int:
        return (self._first_kv if _is_of_keys(name) else self._first)[u]

    def _whole_heads(self, name: str) -> int:
        return self._whole[_is_of_keys(name)]

    def _buffers(
        self, engine: Engine, key: str, xs: Mapping[str, Array], owner: int, layer: int
    ) -> tuple[Array, list[Array]]:
        """For the owner's tokens and the layer's heads of each tensor; all travel together."""
        heads = {False: self.nheads, True: self.nheads_kv}
        n = self._counts[owner]
        like = [((n, heads[_is_of_keys(name)], x.shape[2]), x.dtype) for name, x in xs.items()]
        return engine.work.parcel((key, owner, layer), like)


def _is_of_keys(name: str) -> bool:
    return name in ("k", "v", "dk", "dv")


def _three(x: Array) -> Array:
    return x if x.ndim == 3 else x.reshape(*x.shape, 1)
