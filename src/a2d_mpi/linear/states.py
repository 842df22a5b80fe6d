"""The exchange of states between ranks, and its bytes.

* gather: every rank sends the states of its pieces to all other ranks (LASP-2, arXiv:2502.07563).
* ring: the owner of a piece adds its own state and sends the sum to the owner of the next piece
  (LASP, arXiv:2404.02882).  Under a full mask the last sum goes around once more.

Both add states in the order of tokens, so their results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from a2d_mpi.comm.channel import Channel
from a2d_mpi.comm.transport import HostTransport
from a2d_mpi.linear.chunks import Decay
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
    """
    if not causal:
        return [Piece(p, 0, n) for p, n in enumerate(shards.counts) if n]
    pieces = []
    for owner in range(shards.nshards):
        runs = []
        for run in shards.runs(owner):
            runs += [run] if run.step == 1 else [range(token, token + 1) for token in run]
        runs = [run for run in runs if len(run)]
        pieces += [(run.start, Piece(owner, i, len(run))) for i, run in enumerate(runs)]
    return [piece for _, piece in sorted(pieces)]


def count_pieces(shards: Distribution, causal: bool) -> int:
    """Return ``len(pieces_of(shards, causal))`` without a loop over tokens."""
    if not causal:
        return sum(n > 0 for n in shards.counts)
    runs = (run for owner in range(shards.nshards) for run in shards.runs(owner))
    return sum(len(run) if run.step > 1 else len(run) > 0 for run in runs)


def traffic(pieces: Sequence[Piece], rank: int, way: str, causal: bool, nbytes: int) -> list[int]:
    """Return the bytes that a rank sends and receives in one pass, forward or backward.

    The bytes depend on the number of pieces, but not on the number of tokens.

    Parameters
    ----------
    pieces : sequence of Piece
        Pieces of all ranks, in the order of tokens.
    rank : int
    way : {"gather", "ring"}
    causal : bool
    nbytes : int
        Bytes of a state.

    Returns
    -------
    [int, int]
        Bytes sent and received.
    """
    owners = [piece.owner for piece in pieces]
    if way == "gather":
        own, ranks = owners.count(rank), len(set(owners))
        return [own * (ranks - 1) * nbytes, (len(owners) - own) * nbytes * (own > 0)]
    hops = list(zip(owners, owners[1:]))
    if not causal:
        hops += list(zip([*owners[-1:], *owners], owners[:-1]))
    hops = [(sender, receiver) for sender, receiver in hops if sender != receiver]
    return [sum(hop[side] == rank for hop in hops) * nbytes for side in (0, 1)]


class StateExchange:
    """The exchange of states of a plan; each pass starts and finishes it once.

    Parameters
    ----------
    channel : Channel
        Channel of all ranks.
    pieces : sequence of Piece
        Pieces of all ranks, in the order of tokens.
    way : {"gather", "ring"}
    causal : bool
    decay : Decay
    shape : (int, int, int)
        Shape of a state, (H, F, W).
    dtype : dtype
        Dtype in which states are added.
    """

    def __init__(
        self,
        channel: Channel,
        pieces: Sequence[Piece],
        way: str,
        causal: bool,
        decay: Decay,
        shape: tuple[int, ...],
        dtype: np.dtype,
    ) -> None:
        self._channel, self._pieces, self._way, self._causal = channel, pieces, way, causal
        self._decay, self._shape, self._dtype = decay, shape, dtype
        self._owners = {piece.owner for piece in pieces}
        self.transport = HostTransport()

    def start(self, own: Sequence[np.ndarray], reverse: bool = False) -> None:
        """Start the exchange; `own` are the states, (H, F, W), of this rank's pieces in order.

        With `reverse`, states are added from the last token to the first.
        """
        rank = self._channel.rank
        self._order = list(self._pieces)[:: -1 if reverse else 1]
        self._messages: list[Any] = []
        self._states = {rank: np.array(own, self._dtype).reshape(-1, *self._shape)}
        if self._way == "ring" or rank not in self._owners:
            return
        peers = [peer for peer in self._channel.peers if peer in self._owners]
        for peer in peers:
            count = sum(piece.owner == peer for piece in self._pieces)
            self._states[peer] = np.empty((count, *self._shape), self._dtype)
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
        before, state = self._gathered() if self._way == "gather" else self._passed_on()
        if not self._causal:
            return [state] * len(before)
        return [before[place] for place in range(len(before))]

    def _gathered(self) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """Return the state before each own piece, and the state at the end of the sequence."""
        self._channel.wait(self._messages)
        before, state = {}, np.zeros(self._shape, self._dtype)
        if self._channel.rank not in self._owners:
            return before, state
        for piece in self._order:
            if piece.owner == self._channel.rank:
                before[piece.place] = state
            state = self._decay.add(state, self._states[piece.owner][piece.place], piece.tokens)
        return before, state

    def _passed_on(self) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """Return the same as `_gathered`; the second state is undefined under a causal mask."""
        rank, own = self._channel.rank, self._states[self._channel.rank]
        owners = [piece.owner for piece in self._order]
        before, state = {}, np.zeros(self._shape, self._dtype)
        for i, piece in enumerate(self._order):
            if piece.owner != rank:
                continue
            if i and owners[i - 1] != rank:
                state = self._receive(owners[i - 1])
            before[piece.place] = state
            state = self._decay.add(state, own[piece.place], piece.tokens)
            if i + 1 < len(owners) and owners[i + 1] != rank:
                self._send(state, owners[i + 1])
        if not self._causal and before:  # the sum goes around once more; each rank has one piece
            i = owners.index(rank)
            if i + 1 < len(owners):
                state = self._receive(owners[i - 1])
            following = owners[(i + 1) % len(owners)]
            if following not in (rank, owners[-1]):
                self._send(state, following)
        self._channel.wait(self._messages)
        return before, state

    def _send(self, state: np.ndarray, peer: int) -> None:
        self._messages += self._channel.isend([state], peer, 0)

    def _receive(self, peer: int) -> np.ndarray:
        state = np.empty(self._shape, self._dtype)
        self._channel.wait(self._channel.irecv([state], peer, 0))
        return state
