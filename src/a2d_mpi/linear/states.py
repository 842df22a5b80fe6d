"""The exchange of states between ranks, and its bytes.

* gather: every rank sends the states of its pieces to all other ranks (LASP-2, arXiv:2502.07563).
* ring: the owner of a piece adds its own state and sends the sum to the owner of the next piece
  (LASP, arXiv:2404.02882).  Under a full mask the last sum goes around once more.

Both add states in the order of tokens, so their results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from a2d_mpi.comm.channel import Channel
from a2d_mpi.comm.transport import Transport
from a2d_mpi.core.sizes import next_ranks
from a2d_mpi.sharding.distribution import Distribution

STATES = ("gather", "ring")


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
    way : {"gather", "ring"}
    decay : Decay or None
        None: a full mask, under which nothing decays.
    """

    def __init__(
        self, channel: Channel, pieces: list[Piece], way: str, decay: Decay | None
    ) -> None:
        self._channel, self._pieces, self._way, self._decay = channel, pieces, way, decay
        self.transport = Transport()

    def traffic(self, rank: int, nbytes: int, reverse: bool = False) -> list[int]:
        """Return the bytes that a rank sends and receives in one pass.

        The bytes depend on the number of pieces, but not on the number of tokens.

        Parameters
        ----------
        rank : int
        nbytes : int
            Bytes of a state.
        reverse : bool
            As of `start`.

        Returns
        -------
        [int, int]
            Bytes sent and received.
        """
        owners = self._owners(reverse)
        if self._way == "gather":
            own, ranks = owners.count(rank), len(set(owners))
            return [own * (ranks - 1) * nbytes, (len(owners) - own) * nbytes * (own > 0)]
        hops = [hop for hop in zip(owners, owners[1:]) if hop[0] != hop[1]]
        return [sum(hop[side] == rank for hop in hops) * nbytes for side in (0, 1)]

    def start(self, own: Sequence[np.ndarray], reverse: bool = False) -> None:
        """Start the exchange; `own` are the states, (H, F, W), of this rank's pieces in order.

        With `reverse`, states are added from the last token to the first.
        """
        self._reverse = reverse
        self._messages: list[Any] = []
        self._states = {self._channel.rank: np.array(own)}
        if self._way == "ring" or not len(own):
            return
        owners, rank = self._owners(), self._channel.rank
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
        before, state = (self._gathered if self._way == "gather" else self._passed_on)(own)
        return [before[i] if self._decay else state for i in range(len(own))]

    def _gathered(self, own: np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """Return the state before each own piece, and the state at the end of the sequence."""
        self._channel.wait(self._messages)
        before, state = {}, np.zeros_like(own[0])
        for piece in self._pieces[:: -1 if self._reverse else 1]:
            if piece.owner == self._channel.rank:
                before[piece.place] = state
            state = self._add(state, piece)
        return before, state

    def _passed_on(self, own: np.ndarray) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """Return the same as `_gathered`; the second state is undefined under a causal mask."""
        owners, order = self._owners(self._reverse), self._pieces[:: -1 if self._reverse else 1]
        rank, before, state = self._channel.rank, {}, np.zeros_like(own[0])
        for i in (i for i, owner in enumerate(owners) if owner == rank):
            if i and owners[i - 1] != rank:
                state = np.empty_like(own[0])
                self._channel.wait(self._channel.irecv([state], owners[i - 1], 0))
            if i < len(order):
                before[order[i].place] = state
                state = self._add(state, order[i])
            if i + 1 < len(owners) and owners[i + 1] != rank:
                self._messages += self._channel.isend([state], owners[i + 1], 0)
        self._channel.wait(self._messages)
        return before, state

    def _add(self, state: np.ndarray, piece: Piece) -> np.ndarray:
        """Return the state after a piece."""
        more = self._states[piece.owner][piece.place]
        return self._decay.add(state, more, piece.tokens) if self._decay else state + more

    def _owners(self, reverse: bool = False) -> list[int]:
        """Return the owner of each piece; on a ring these are the ranks that a sum visits in turn.

        Under a full mask, where each rank has one piece, the sum of all goes around once more.
        """
        owners = [piece.owner for piece in self._pieces][:: -1 if reverse else 1]
        again = self._way == "ring" and not self._decay
        return [*owners, *owners[:-1]] if again else owners
