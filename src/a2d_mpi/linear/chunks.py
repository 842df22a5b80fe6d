"""Compute linear attention on one rank, as products of matrices.

Causal linear attention with a decay of each head (RetNet, arXiv:2307.08621) is, for tokens i and
j::

    o_i = sum over j <= i of  decay^(i - j) (q_i . k_j) v_j

A shard is cut into pieces of consecutive tokens, and a piece into chunks of C tokens.  The state,
(H, F, W), before token e sums up all tokens j before it::

    S = sum over j < e of  decay^(e - 1 - j) k_j v_j^T

Another n tokens turn S into ``decay^n S + S'``, where S' is the state of these tokens alone.  No
exponent is negative, so nothing overflows, however long the sequence is.

Arrays are head-major: q and k are (H, n, F), v and o are (H, n, W).  W is the width of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy import ndarray

from a2d_mpi.linear.states import Decay, StateExchange

Pieces = Sequence[Sequence[slice]]  # the chunks of each piece, as rows of the shard


class FullSums:
    """Sums of one rank under a full mask, where nothing decays."""

    def __init__(self, exchange: StateExchange) -> None:
        self._exchange = exchange

    def forward(self, q: ndarray, k: ndarray, v: ndarray) -> tuple[ndarray, list[ndarray]]:
        """Compute sums of this rank's queries.

        Parameters
        ----------
        q, k, v : (H, n, F), (H, n, F), (H, n, W)
            Features of queries and keys, and values, of this rank's shard.

        Returns
        -------
        o : (H, n, W)
        states : list of (H, F, W)
            The state of all tokens.  Under a causal mask, the state before each piece.
        """
        self._exchange.start([k.swapaxes(1, 2) @ v] if len(v[0]) else [])
        states = self._exchange.finish()
        return (q @ states[0] if states else np.empty_like(v)), states

    def backward(
        self, do: ndarray, q: ndarray, k: ndarray, v: ndarray, states: Sequence[ndarray]
    ) -> tuple[ndarray, ndarray, ndarray]:
        """Compute the gradients of q, k and v; `states` are as `forward` returns them."""
        if not len(states):
            return q, k, v  # no tokens
        self._exchange.start([q.swapaxes(1, 2) @ do], reverse=True)
        dq = do @ states[0].swapaxes(1, 2)
        (dstate,) = self._exchange.finish()
        return dq, v @ dstate.swapaxes(1, 2), k @ dstate


class CausalSums(FullSums):
    """Sums of one rank under a causal mask, chunk by chunk.

    The gradient of the state is summed from the last token to the first.
    """

    def __init__(self, exchange: StateExchange, decay: Decay, pieces: Pieces) -> None:
        super().__init__(exchange)
        self._decay, self._pieces = decay, pieces

    def forward(self, q: ndarray, k: ndarray, v: ndarray) -> tuple[ndarray, list[ndarray]]:
        decay, pieces = self._decay, self._pieces
        own = [[self._state(k, v, rows) for rows in piece] for piece in pieces]
        self._exchange.start([self._total(x, piece) for x, piece in zip(own, pieces)])
        o = np.empty_like(v)
        for rows in chain.from_iterable(pieces):  # pairs of tokens of one chunk
            n = _length(rows)
            weights = (q[:, rows] @ k[:, rows].swapaxes(1, 2)) * decay.within[:, :n, :n]
            o[:, rows] = weights @ v[:, rows]
            self._exchange.poll()
        states = self._exchange.finish()
        for piece, of_chunks, before in zip(pieces, own, states):  # tokens before each chunk
            for rows, state in zip(piece, decay.scan(of_chunks, map(_length, piece), before)):
                o[:, rows] += decay.rise[:, : _length(rows)] * (q[:, rows] @ state)
        return o, states

    def backward(
        self, do: ndarray, q: ndarray, k: ndarray, v: ndarray, states: Sequence[ndarray]
    ) -> tuple[ndarray, ndarray, ndarray]:
        decay, reverse = self._decay, [piece[::-1] for piece in self._pieces]
        own = [[self._dstate(q, do, rows) for rows in piece] for piece in reverse]
        self._exchange.start([self._total(x, y) for x, y in zip(own, reverse)], reverse=True)
        dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
        for piece, state in zip(self._pieces, states):
            for rows in piece:
                n = _length(rows)
                within = decay.within[:, :n, :n]
                weights = (q[:, rows] @ k[:, rows].swapaxes(1, 2)) * within
                dweights = (do[:, rows] @ v[:, rows].swapaxes(1, 2)) * within
                from_before = decay.rise[:, :n] * (do[:, rows] @ state.swapaxes(1, 2))
                dq[:, rows] = dweights @ k[:, rows] + from_before
                dk[:, rows] = dweights.swapaxes(1, 2) @ q[:, rows]
                dv[:, rows] = weights.swapaxes(1, 2) @ do[:, rows]
                state = decay.add(state, self._state(k, v, rows), n)
                self._exchange.poll()
        for piece, of_chunks, after in zip(reverse, own, self._exchange.finish()):
            for rows, dstate in zip(piece, decay.scan(of_chunks, map(_length, piece), after)):
                fall = decay.fall(_length(rows))
                dk[:, rows] += fall * (v[:, rows] @ dstate.swapaxes(1, 2))
                dv[:, rows] += fall * (k[:, rows] @ dstate)
        return dq, dk, dv

    def _state(self, k: ndarray, v: ndarray, rows: slice) -> ndarray:
        """Compute the state of a chunk alone, at its end, (H, F, W)."""
        return (self._decay.fall(_length(rows)) * k[:, rows]).swapaxes(1, 2) @ v[:, rows]

    def _dstate(self, q: ndarray, do: ndarray, rows: slice) -> ndarray:
        """Compute the gradient of the state at the start of a chunk from it alone, (H, F, W)."""
        return (self._decay.rise[:, : _length(rows)] * q[:, rows]).swapaxes(1, 2) @ do[:, rows]

    def _total(self, own: Sequence[ndarray], piece: Sequence[slice]) -> ndarray:
        """Add up the states of a piece's chunks to the state of the piece alone, (H, F, W)."""
        *_, last = self._decay.scan(own, map(_length, piece), np.zeros_like(own[0]))
        return last


def _length(rows: slice) -> int:
    return rows.stop - rows.start
