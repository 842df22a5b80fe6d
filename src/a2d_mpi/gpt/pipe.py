"""Messages between attention ranks and FFN ranks, see `a2d_mpi.gpt.apart`."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from a2d_mpi.comm.channel import Traffic
from a2d_mpi.devices.protocol import Array, Device
from a2d_mpi.gpt.exchange import ArrayExchange
from a2d_mpi.gpt.layers import module_of
from a2d_mpi.gpt.parameters import Parameters


def part_of(n: int, i: int, parts: int) -> slice:
    """Return part i of n things that are cut into equal parts, up to one thing."""
    return slice(n * i // parts, n * (i + 1) // parts)


class Line:
    """The messages of a batch between attention ranks and FFN ranks, layer after layer.

    A rank takes and gives rows in turn.  It posts the receives of the next rows before it gives.

    Parameters
    ----------
    exchange : ArrayExchange
    to, sources : sequence of int
        Ranks to which this rank gives rows, and from which it takes rows.
    shape : (int, int)
        Shape of the rows, (n, E).
    like : array
        Array with the device and the dtype of the rows.
    takes : int
        Number of calls of `take`.
    tag : int
        MPI tag of the batch.
    """

    def __init__(
        self,
        exchange: ArrayExchange,
        to: Sequence[int],
        sources: Sequence[int],
        shape: tuple[int, int],
        like: Array,
        takes: int,
        tag: int,
    ) -> None:
        self._exchange, self._to, self._sources, self._tag = exchange, to, sources, tag
        self._shape, self._like, self._takes, self._messages = shape, like, takes, []
        self._expect()

    def take(self) -> Array:
        """Block until the rows of all sources have arrived; return their sum, in rank order."""
        self._exchange.wait(self._messages)
        total, *others = self._rows
        for x in others:
            total += x
        self._expect()
        return total

    def give(self, rows: Array) -> None:
        """Start to send rows, which must not change afterwards."""
        for peer in self._to:
            self._messages += self._exchange.send(rows, peer, self._tag)

    def end(self) -> None:
        """Block until all rows have been sent."""
        self._exchange.wait(self._messages)

    def _expect(self) -> None:
        self._rows = []
        if self._takes:
            self._takes -= 1
            empty = module_of(self._like).empty
            self._rows = [empty(self._shape, self._like.dtype) for _ in self._sources]
            for x, source in zip(self._rows, self._sources):
                self._messages += self._exchange.receive(x, source, self._tag)


class Pipe:
    """All lines between attention ranks and FFN ranks.  Collective.

    Parameters
    ----------
    comm : Intracomm
        Attention ranks, then FFN ranks.
    attention_ranks, micro_batches : int
    weights : Parameters
        Weights of this rank.
    way : tuple of Traffic, Device, str
        Arguments `traffic`, `device` and `transfers` of an `ArrayExchange`.  Messages have channel
        "pipe", and phase "prefill" or "decode".
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        attention_ranks: int,
        micro_batches: int,
        weights: Parameters,
        way: tuple[Traffic, Device, str],
    ) -> None:
        self.comm, self.attention_ranks, self._weights = comm, range(attention_ranks), weights
        self.ffn_ranks, self._micro_batches = range(attention_ranks, comm.size), micro_batches
        self.prefill = ArrayExchange(comm, "prefill", "pipe", *way)
        self.decode = ArrayExchange(comm, "decode", "pipe", *way)

    def line(
        self, exchange: ArrayExchange, holders: Sequence[int], rows: int, takes: int, tag: int
    ) -> Line:
        """Make a line for rows of which each rank of `holders` has a copy.

        Each FFN rank receives the rows from one holder; the holders share these messages out in
        turn.  All holders receive the rows that come back.
        """
        givers = [holders[i % len(holders)] for i in range(len(self.ffn_ranks))]
        if self.comm.rank in self.attention_ranks:
            to = [x for x, giver in zip(self.ffn_ranks, givers) if giver == self.comm.rank]
            sources = self.ffn_ranks
        else:
            to, sources = holders, [givers[self.ffn_ranks.index(self.comm.rank)]]
        shape = rows, self._weights.config.width
        return Line(exchange, to, sources, shape, self._weights.flat, takes, tag)

    def step(self, requests: int) -> list[tuple[slice, Line]]:
        """Cut the requests of a step into micro-batches; return each with its line."""
        number, takes = min(requests, self._micro_batches), self._weights.config.layers + 1
        batches = [part_of(requests, i, number) for i in range(number)]
        return [
            (x, self.line(self.decode, self.attention_ranks, x.stop - x.start, takes, tag))
            for tag, x in enumerate(batches)
        ]

    def free(self) -> None:
        """Free the communicators.  Collective."""
        self.prefill.free()
        self.decode.free()
