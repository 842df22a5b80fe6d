"""A GPT, forward and backward, on the tokens of one rank.

    x = wte[token] + wpe[position]                        (Radford et al., GPT-2)
    for each block:
        x = x + proj(attention(qkv(ln1(x))))
        x = x + out(gelu(fc(ln2(x))))
    logits = ln_f(x) @ wte.T

Every row is a token of this rank; attention is the only layer where rows meet, and the only one
that communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt.layers import (
    add_rows,
    cross_entropy,
    flat,
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    linear_backward,
    module_of,
    rotate,
    rotation,
)
from a2d_mpi.gpt.parameters import Parameters


class Attention(Protocol):
    """The part of an `a2d_mpi.attention.plan.AttentionPlan` that a model needs."""

    tokens: np.ndarray

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Out and lse of this rank's queries."""

    def backward(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array
    ) -> tuple[Array, Array, Array]:
        """Gradients of this rank's q, k and v."""


class Kept(NamedTuple):
    """Arrays that a block keeps for its backward pass; with checkpointing, `inside` is made again.

    Attributes
    ----------
    x : (n, E)
        Its input.
    out, lse : (n, H, D), (n, H)
        Of attention, which is never computed again.
    inside : tuple or None
        See `_before` and `_after`.
    """

    x: Array
    out: Array
    lse: Array
    inside: tuple | None


class GPT:
    """A GPT on one rank's tokens.

    Parameters
    ----------
    weights : Parameters
    attention : Attention
        A plan with the sizes of the model; its `tokens` are this rank's.
    positions : (n,) int64, optional
        Of this rank's tokens, in their documents.  Default: in the sequence.
    checkpoint : bool
        Keep of each block its input and attention's out and lse only, and compute all else again
        in the backward pass, but not attention (Li et al., DistFlashAttn, arXiv:2310.03294).
    """

    def __init__(
        self,
        weights: Parameters,
        attention: Attention,
        positions: np.ndarray | None = None,
        checkpoint: bool = False,
    ) -> None:
        self.weights, self.attention, self.checkpoint = weights, attention, checkpoint
        self.config = weights.config
        xp = module_of(weights.flat)
        positions = attention.tokens if positions is None else positions
        self._positions = xp.asarray(positions)
        self._rotation = None
        if self.config.positions == "rotary":
            self._rotation = rotation(self._positions, self.config.headdim, weights.flat.dtype)

    def loss(
        self,
        tokens: Array,
        targets: Array,
        count: int,
        gradients: Parameters | None = None,
        finished: Callable[[slice], None] = lambda part: None,
    ) -> float:
        """This rank's part of the mean loss; the sum over ranks is the loss.  Collective.

        Parameters
        ----------
        tokens, targets : (n,) int64
            Of this rank; a target of -1 counts nothing.
        count : int
            Targets of all ranks, by which sums are divided.
        gradients : Parameters, optional
            Gets this rank's part of the gradient of the mean loss.
        finished : callable
            Told of each part of the flat gradient that is finished, in the same order on all
            ranks.
        """
        x, kept = self._embed(tokens), []
        for i in range(self.config.layers):
            x, of_block = self._block(i, x)
            kept.append(of_block if gradients is not None else None)
        if gradients is not None:
            gradients.flat[:] = 0
        loss, dx = self._last(x, targets, count, gradients)
        if gradients is None:
            return loss
        buckets = gradients.buckets()
        for i in reversed(range(self.config.layers)):
            dx = self._block_backward(i, dx, kept.pop(), gradients)
            finished(next(buckets))
        d = gradients.named
        add_rows(d["wte"], tokens, dx)
        if "wpe" in d:
            add_rows(d["wpe"], self._positions, dx)
        finished(next(buckets))
        return loss

    def _last(
        self, x: Array, targets: Array, count: int, gradients: Parameters | None
    ) -> tuple[float, Array | None]:
        """Loss of the last block's output, and its gradient; the logits are soon gone."""
        w = self.weights.named
        h, of_norm = layer_norm(x, w["ln_f.weight"], w["ln_f.bias"])
        dlogits = h @ w["wte"].T  # (n, V)
        loss = cross_entropy(dlogits, targets) / count
        if gradients is None:
            return loss, None
        d = gradients.named
        dlogits *= 1 / count
        d["wte"] += dlogits.T @ h
        norm = w["ln_f.weight"], d["ln_f.weight"], d["ln_f.bias"]
        return loss, layer_norm_backward(dlogits @ w["wte"], of_norm, *norm)

    def hidden(self, tokens: Array) -> Array:
        """Normalised output of the last block for this rank's tokens, (n, E).  Collective."""
        x, w = self._embed(tokens), self.weights.named
        for i in range(self.config.layers):
            x, _ = self._block(i, x)
        return layer_norm(x, w["ln_f.weight"], w["ln_f.bias"])[0]

    def logits(self, hidden: Array) -> Array:
        """Logits of rows that `hidden` has returned, (n, V)."""
        return hidden @ self.weights.named["wte"].T

    def _embed(self, tokens: Array) -> Array:
        w = self.weights.named
        x = w["wte"][tokens]  # (n, E)
        return x + w["wpe"][self._positions] if "wpe" in w else x

    def _block(self, i: int, x: Array) -> tuple[Array, Kept]:
        """One block: its output, and what its backward pass needs."""
        w = self.weights.block(i)
        qkv, of_norm = self._before(w, x)
        out, lse = self.attention.forward(*qkv)  # (n, H, D), (n, H)
        y, of_mlp = self._after(w, x, out)
        inside = None if self.checkpoint else (qkv, of_norm, of_mlp)
        return y, Kept(x, out, lse, inside)

    def _block_backward(self, i: int, dy: Array, kept: Kept, gradients: Parameters) -> Array:
        """Gradient of a block's input."""
        w, d = self.weights.block(i), gradients.block(i)
        x, out, lse, inside = kept
        if inside is None:
            qkv, of_norm = self._before(w, x)
            inside = qkv, of_norm, self._after(w, x, out)[1]
        qkv, of_norm, of_mlp = inside
        dx, dout = self._after_backward(w, d, dy, out, of_mlp)
        dqkv = self.attention.backward(dout, *qkv, out, lse)
        return dx + self._before_backward(w, d, dqkv, of_norm)

    def _before(self, w: dict[str, Array], x: Array) -> tuple[tuple, tuple]:
        """Queries, keys and values of x, (n, H, D) and (n, Hkv, D), and what LayerNorm keeps."""
        h, of_norm = layer_norm(x, w["ln1.weight"], w["ln1.bias"])
        q, k, v = self._split(h @ w["qkv.weight"] + w["qkv.bias"])
        if self._rotation:
            q, k = rotate(q, *self._rotation), rotate(k, *self._rotation)
        return (q, k, v), (h, of_norm)

    def _before_backward(
        self, w: dict[str, Array], d: dict[str, Array], dqkv: tuple, kept: tuple
    ) -> Array:
        (dq, dk, dv), (h, of_norm) = dqkv, kept
        if self._rotation:
            cos, sin = self._rotation
            dq, dk = rotate(dq, cos, -sin), rotate(dk, cos, -sin)
        rows = [flat(x) for x in (dq, dk, dv)]
        joined = module_of(dq).concatenate(rows, axis=1)  # (n, (H + 2 Hkv) D)
        dh = linear_backward(joined, h, w["qkv.weight"], d["qkv.weight"], d["qkv.bias"])
        return layer_norm_backward(dh, of_norm, w["ln1.weight"], d["ln1.weight"], d["ln1.bias"])

    def _split(self, qkv: Array) -> list[Array]:
        """Heads of queries, keys and values, each contiguous."""
        config, heads_of, begin = self.config, [], 0
        for heads in (config.nheads, config.nheads_kv, config.nheads_kv):
            end = begin + heads * config.headdim
            part = module_of(qkv).ascontiguousarray(qkv[:, begin:end])
            heads_of.append(part.reshape(len(qkv), heads, config.headdim))
            begin = end
        return heads_of

    def _after(self, w: dict[str, Array], x: Array, out: Array) -> tuple[Array, tuple]:
        """The rest of a block after attention, (n, E), and what its backward pass needs."""
        y = x + flat(out) @ w["proj.weight"] + w["proj.bias"]
        h, of_norm = layer_norm(y, w["ln2.weight"], w["ln2.bias"])
        hidden = h @ w["fc.weight"] + w["fc.bias"]  # (n, M)
        return y + gelu(hidden) @ w["out.weight"] + w["out.bias"], (h, of_norm, hidden)

    def _after_backward(
        self, w: dict[str, Array], d: dict[str, Array], dz: Array, out: Array, kept: tuple
    ) -> tuple[Array, Array]:
        """Gradients of the residual stream, (n, E), and of attention's out, (n, H, D)."""
        h, of_norm, hidden = kept
        active = gelu(hidden)
        da = linear_backward(dz, active, w["out.weight"], d["out.weight"], d["out.bias"])
        dhidden = gelu_backward(da, hidden)
        dh = linear_backward(dhidden, h, w["fc.weight"], d["fc.weight"], d["fc.bias"])
        norm = w["ln2.weight"], d["ln2.weight"], d["ln2.bias"]
        dy = dz + layer_norm_backward(dh, of_norm, *norm)
        dout = linear_backward(dy, flat(out), w["proj.weight"], d["proj.weight"], d["proj.bias"])
        return dy, dout.reshape(out.shape)
