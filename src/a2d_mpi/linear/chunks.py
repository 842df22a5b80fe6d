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

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from a2d_mpi.linear.states import StateExchange


Pieces = Sequence[Sequence[slice]]  # the chunks of each piece, as rows of the shard


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


def forward_causal(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pieces: Pieces,
    decay: Decay,
    exchange: StateExchange,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Compute causal linear attention of one rank.

    Parameters
    ----------
    q, k, v : (H, n, F), (H, n, F), (H, n, W)
        Features of queries and keys, and values, of this rank's shard.
    pieces : sequence of sequence of slice
        Chunks of each piece, as rows of the shard.
    decay : Decay
    exchange : StateExchange

    Returns
    -------
    o : (H, n, W)
    states : list of (H, F, W)
        State before each piece.
    """
    own = [[_state_of_chunk(k, v, rows, decay) for rows in piece] for piece in pieces]
    exchange.start([_total(x, piece, decay) for x, piece in zip(own, pieces)])
    o = np.empty_like(v)
    for rows in chain.from_iterable(pieces):  # pairs of tokens of one chunk
        n = _length(rows)
        weights = (q[:, rows] @ k[:, rows].swapaxes(1, 2)) * decay.within[:, :n, :n]
        o[:, rows] = weights @ v[:, rows]
        exchange.poll()
    states = exchange.finish()
    for piece, of_chunks, before in zip(pieces, own, states):  # tokens before each chunk
        for rows, state in zip(piece, decay.scan(of_chunks, map(_length, piece), before)):
            o[:, rows] += decay.rise[:, : _length(rows)] * (q[:, rows] @ state)
    return o, states


def backward_causal(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    states: Sequence[np.ndarray],
    pieces: Pieces,
    decay: Decay,
    exchange: StateExchange,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradients of q, k and v; `states` are the states that `forward_causal` returns.

    The gradient of the state is summed from the last token to the first.
    """
    own = [[_dstate_of_chunk(q, do, rows, decay) for rows in piece] for piece in pieces]
    reverse = [piece[::-1] for piece in pieces]
    exchange.start([_total(x[::-1], y, decay) for x, y in zip(own, reverse)], reverse=True)
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    for piece, state in zip(pieces, states):
        for rows in piece:
            n = _length(rows)
            within = decay.within[:, :n, :n]
            weights = (q[:, rows] @ k[:, rows].swapaxes(1, 2)) * within
            dweights = (do[:, rows] @ v[:, rows].swapaxes(1, 2)) * within
            from_before = decay.rise[:, :n] * (do[:, rows] @ state.swapaxes(1, 2))
            dq[:, rows] = dweights @ k[:, rows] + from_before
            dk[:, rows] = dweights.swapaxes(1, 2) @ q[:, rows]
            dv[:, rows] = weights.swapaxes(1, 2) @ do[:, rows]
            state = decay.add(state, _state_of_chunk(k, v, rows, decay), n)
            exchange.poll()
    for piece, of_chunks, after in zip(reverse, own, exchange.finish()):
        for rows, dstate in zip(piece, decay.scan(of_chunks[::-1], map(_length, piece), after)):
            fall = decay.fall(_length(rows))
            dk[:, rows] += fall * (v[:, rows] @ dstate.swapaxes(1, 2))
            dv[:, rows] += fall * (k[:, rows] @ dstate)
    return dq, dk, dv


def forward_full(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, exchange: StateExchange
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Compute o and the state of all tokens under a full mask, where nothing decays."""
    exchange.start([k.swapaxes(1, 2) @ v] if len(v[0]) else [])
    states = exchange.finish()
    return (q @ states[0] if states else np.empty_like(v)), states


def backward_full(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    states: Sequence[np.ndarray],
    exchange: StateExchange,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradients of q, k and v under a full mask; `states` are as in `forward_full`."""
    if not states:
        return q, k, v  # no tokens
    exchange.start([q.swapaxes(1, 2) @ do], reverse=True)
    dq = do @ states[0].swapaxes(1, 2)
    (dstate,) = exchange.finish()
    return dq, v @ dstate.swapaxes(1, 2), k @ dstate


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _state_of_chunk(k: np.ndarray, v: np.ndarray, rows: slice, decay: Decay) -> np.ndarray:
    """Compute the state of a chunk alone, at its end, (H, F, W)."""
    return (decay.fall(_length(rows)) * k[:, rows]).swapaxes(1, 2) @ v[:, rows]


def _dstate_of_chunk(q: np.ndarray, do: np.ndarray, rows: slice, decay: Decay) -> np.ndarray:
    """Compute the gradient of the state at the start of a chunk from this chunk, (H, F, W)."""
    return (decay.rise[:, : _length(rows)] * q[:, rows]).swapaxes(1, 2) @ do[:, rows]


def _total(own: Sequence[np.ndarray], piece: Sequence[slice], decay: Decay) -> np.ndarray:
    """Add up the states of a piece's chunks to the state of the piece alone, (H, F, W)."""
    *_, last = decay.scan(own, map(_length, piece), np.zeros_like(own[0]))
    return last
