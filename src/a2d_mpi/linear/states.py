"""The exchange of states between ranks, and its bytes.

Every rank sends the states of its pieces to all other ranks, which add them in the order of tokens
(LASP-2, arXiv:2502.07563).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from a2d_mpi.comm.channel import Channel
from a2d_mpi.comm.transport import Transport
from a2d_mpi.core.sizes import next_ranks
from a2d_mpi.sharding.distribution import Distribution


class Piece(NamedTuple):
    """Consecutive tokens of one rank, which have one state.

    Attributes
    ----------
    owner : int
    place : int
        Index of the piece among the pieces of its owner.
    tokens : int
        Number of tokens.
    """

    owner: int
    place: int
    tokens: int


def pieces_of(shards: Distribution, causal: bool) -> list[Piece]:
    """Return the pieces of all ranks in the order of tokens, without empty pieces.

    Under a full mask the order of tokens does not matter, and a shard is one piece.

    Raises
    ------
    ValueError
        If each token would be a piece.
    """
    if not causal:
        return [Piece(p, 0, n) for p, n in enumerate(shards.counts) if n]
    pieces = []
    for owner in range(shards.nshards):
        runs = [run for run in shards.runs(owner) if len(run)]
        if any(run.step > 1 for run in runs):
            raise ValueError(
                f"linear attention needs runs of consecutive tokens, got the {shards.name} "
                "distribution, in which each token would have a state"
            )
        pieces += [(run.start, Piece(owner, i, len(run))) for i, run in enumerate(runs)]
    return [piece for _, piece in sorted(pieces)]


class Decay:
    """Powers of the decay of each head.

    Parameters
    ----------
    decay : (H,) float64
        Decay of each head, in (0, 1].
    chunk : int
        C, tokens of the longest chunk.
    dtype : dtype
        Dtype of the factors.

    Attributes
    ----------
    within : (H, C, C)
        Row i, column j: decay^(i - j) where j <= i, else 0.
    rise : (H, C, 1)
        Row i: decay^(i + 1).
    """

    def __init__(self, decay: np.ndarray, chunk: int, dtype: np.dtype) -> None:
        rows = np.arange(chunk)
        lag = rows[:, None] - rows
        powers = decay[:, None] ** np.arange(chunk + 1)  # (H, C + 1)
        self._decay, self._dtype = decay[:, None, None], dtype
        self._powers = powers[..., None].astype(dtype)
        self.within = np.where(lag >= 0, powers[:, abs(lag)], 0).astype(dtype)
        self.rise = self._powers[:, 1:]

    def fall(self, n: int) -> np.ndarray:
        """Return decay^(n - 1 - j) for rows j of n, (H, n, 1)."""
        return self._powers[:, :n][:, ::-1]

    def add(self, state: np.ndarray, more: np.ndarray, n: int) -> np.ndarray:
        """Return the state after n more tokens; `more` is the state of these tokens alone."""
        return (self._decay**n).astype(self._dtype) * state + more

    def scan(
        self, added: Iterable[np.ndarray], lengths: Iterable[int], state: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yield the state before each of the added states, and after the last."""
        for more, n in zip(added, lengths):
            yield state
            state = self.add(state, more, n)
        yield state


class StateExchange:
    """The exchange of states of a plan; each pass starts and finishes it once.

    Parameters
    ----------
    channel : Channel
        Channel of all ranks.
    pieces : list of Piece
        Pieces of all ranks, in the order of tokens.
    decay : Decay or None
        None: a full mask, under which nothing decays.
    """

    def __init__(self, channel: Channel, pieces: list[Piece], decay: Decay | None) -> None:
        self._channel, self._pieces, self._decay = channel, pieces, decay
        self._owners = [piece.owner for piece in pieces]
        self.transport = Transport()

    def traffic(self, rank: int, nbytes: int) -> list[int]:
        """Return the bytes that a rank sends and receives in one pass.

        The bytes depend on the number of pieces, but not on the number of tokens.

        Parameters
        ----------
        rank : int
        nbytes : int
            Bytes of a state.

        Returns
        -------
        [int, int]
            Bytes sent and received.
        """
        own, ranks = self._owners.count(rank), len(set(self._owners))
        return [own * (ranks - 1) * nbytes, (len(self._owners) - own) * nbytes * (own > 0)]

    def start(self, own: Sequence[np.ndarray], reverse: bool = False) -> None:
        """Start the exchange; `own` are the states, (H, F, W), of this rank's pieces in order.

        With `reverse`, states are added from the last token to the first.
        """
        self._reverse = reverse
        self._messages: list[Any] = []
        self._states = {self._channel.rank: np.array(own)}
        if not len(own):
            return
        owners, rank = self._owners, self._channel.rank
        peers = [peer for peer in next_ranks(rank, self._channel.comm.size) if peer in owners]
        for peer in peers:
            self._states[peer] = np.empty((owners.count(peer), *own[0].shape), own[0].dtype)
            self._messages += self._channel.irecv([self._states[peer]], peer, 0)
        for peer in peers:
            self._messages += self._channel.isend([self._states[rank]], peer, 0)

    def poll(self) -> None:
        """Let messages advance."""
        self.transport.poll(self._channel.comm)

    def finish(self) -> list[np.ndarray]:
        """Finish the exchange; return the state before each of this rank's pieces, in order.

        Under a full mask, return the state of all tokens for each piece.
        """
        own = self._states[self._channel.rank]
        if not len(own):
            return []
        self._channel.wait(self._messages)
        before, state = {}, np.zeros_like(own[0])
        for piece in self._pieces[:: -1 if self._reverse else 1]:
            if piece.owner == self._channel.rank:
                before[piece.place] = state
            more = self._states[piece.owner][piece.place]
            state = self._decay.add(state, more, piece.tokens) if self._decay else state + more
        return [before[i] if self._decay else state for i in range(len(own))]
