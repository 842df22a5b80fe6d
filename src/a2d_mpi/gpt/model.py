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
from a2d_mpi.gpt import layers
from a2d_mpi.gpt.layers import flat, module_of
from a2d_mpi.gpt.parameters import Parameters


class Attention(Protocol):
    """The part of an `a2d_mpi.attention.plan.AttentionPlan` that a model needs.

    Also of an `a2d_mpi.linear.plan.LinearAttention`, which has what it keeps in place of lse.
    """

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
    linear : Attention, optional
        Of the same tokens, for the linear layers of the model, if it has them.
    """

    def __init__(
        self,
        weights: Parameters,
        attention: Attention,
        positions: np.ndarray | None = None,
        checkpoint: bool = False,
        linear: Attention | None = None,
    ) -> None:
        self.weights, self.attention, self.checkpoint = weights, attention, checkpoint
        self.config, self._linear = weights.config, linear
        if self.config.hybrid and linear is None:
            raise ValueError(f"layers {self.config.layer_pattern} need linear attention, too")
        xp = module_of(weights.flat)
        positions = attention.tokens if positions is None else positions
        self._positions = xp.asarray(positions)
        self._rotation = None
        if self.config.positions == "rotary":
            self._rotation = layers.rotation(
                self._positions, self.config.headdim, weights.flat.dtype
            )

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
        if gradients is None:
            return layers.cross_entropy(self.logits(self.hidden(tokens)), targets) / count
        x, kept = self._embed(tokens), []
        for i in range(self.config.layers):
            x, of_block = self._block(i, x)
            kept.append(of_block)
        gradients.flat[:] = 0
        w, d = self.weights.named, gradients.named
        h, of_norm = layers.layer_norm(x, w, "ln_f")
        dlogits = self.logits(h)  # (n, V); the logits become their gradient
        loss = layers.cross_entropy(dlogits, targets) / count
        dlogits *= 1 / count
        d["wte"] += dlogits.T @ h
        dx = layers.layer_norm_backward(dlogits @ w["wte"], of_norm, w, d, "ln_f")
        del dlogits, h, of_norm  # large
        buckets = gradients.buckets()
        for i in reversed(range(self.config.layers)):
            dx = self._block_backward(i, dx, kept.pop(), gradients)
            finished(next(buckets))
        layers.add_rows(d["wte"], tokens, dx)
        if "wpe" in d:
            layers.add_rows(d["wpe"], self._positions, dx)
        finished(next(buckets))
        return loss

    def hidden(self, tokens: Array) -> Array:
        """Normalised output of the last block for this rank's tokens, (n, E).  Collective."""
        x, w = self._embed(tokens), self.weights.named
        for i in range(self.config.layers):
            x, _ = self._block(i, x)
        return layers.layer_norm(x, w, "ln_f")[0]

    def attend(self, i: int, x: Array) -> tuple[Array, Array]:
        """Block i up to its MLP: the residual stream and the MLP's input, (n, E).  Collective."""
        w = self.weights.blocks[i]
        qkv, _ = self._before(w, x)
        out, _ = self.attention.forward(*qkv)
        y = x + flat(out) @ w["proj.weight"] + w["proj.bias"]
        return y, layers.layer_norm(y, w, "ln2")[0]

    def logits(self, hidden: Array) -> Array:
        """Logits of rows that `hidden` has returned, (n, V)."""
        return hidden @ self.weights.named["wte"].T

    def _embed(self, tokens: Array) -> Array:
        w = self.weights.named
        x = w["wte"][tokens]  # (n, E)
        return x + w["wpe"][self._positions] if "wpe" in w else x

    def _block(self, i: int, x: Array) -> tuple[Array, Kept]:
        """One block: its output, and what its backward pass needs."""
        w = self.weights.blocks[i]
        qkv, of_norm = self._before(w, x)
        out, lse = self._attention_of(i).forward(*qkv)  # (n, H, D), (n, H)
        y, of_mlp = self._after(w, x, out)
        inside = None if self.checkpoint else (qkv, of_norm, of_mlp)
        return y, Kept(x, out, lse, inside)

    def _block_backward(self, i: int, dy: Array, kept: Kept, gradients: Parameters) -> Array:
        """Gradient of a block's input."""
        w, d = self.weights.blocks[i], gradients.blocks[i]
        x, out, lse, inside = kept
        if inside is None:
            qkv, of_norm = self._before(w, x)
            inside = qkv, of_norm, self._after(w, x, out)[1]
        qkv, of_norm, of_mlp = inside
        dx, dout = self._after_backward(w, d, dy, out, of_mlp)
        dqkv = self._attention_of(i).backward(dout, *qkv, out, lse)
        return dx + self._before_backward(w, d, dqkv, of_norm)

    def _attention_of(self, i: int) -> Attention:
        return self._linear if self.config.is_linear(i) else self.attention

    def _before(self, w: dict[str, Array], x: Array) -> tuple[tuple, tuple]:
        """Queries, keys and values of x, (n, H, D) and (n, Hkv, D), and what LayerNorm keeps."""
        h, of_norm = layers.layer_norm(x, w, "ln1")
        q, k, v = self._split(h @ w["qkv.weight"] + w["qkv.bias"])
        if self._rotation:
            q, k = layers.rotate(q, *self._rotation), layers.rotate(k, *self._rotation)
        return (q, k, v), (h, of_norm)

    def _before_backward(
        self, w: dict[str, Array], d: dict[str, Array], dqkv: tuple, kept: tuple
    ) -> Array:
        (dq, dk, dv), (h, of_norm) = dqkv, kept
        if self._rotation:
            cos, sin = self._rotation
            dq, dk = layers.rotate(dq, cos, -sin), layers.rotate(dk, cos, -sin)
        rows = [flat(x) for x in (dq, dk, dv)]
        joined = module_of(dq).concatenate(rows, axis=1)  # (n, (H + 2 Hkv) D)
        dh = layers.linear_backward(joined, h, w, d, "qkv")
        return layers.layer_norm_backward(dh, of_norm, w, d, "ln1")

    def _split(self, qkv: Array) -> list[Array]:
        """Heads of queries, keys and values, each contiguous."""
        heads = (self.config.nheads, self.config.nheads_kv, self.config.nheads_kv)
        xp, headdim = module_of(qkv), self.config.headdim
        q_end, k_end = heads[0] * headdim, sum(heads[:2]) * headdim
        parts = qkv[:, :q_end], qkv[:, q_end:k_end], qkv[:, k_end:]
        return [xp.ascontiguousarray(x).reshape(len(x), n, headdim) for x, n in zip(parts, heads)]

    def _after(self, w: dict[str, Array], x: Array, out: Array) -> tuple[Array, tuple]:
        """The rest of a block after attention, (n, E), and what its backward pass needs."""
        y = x + flat(out) @ w["proj.weight"] + w["proj.bias"]
        h, of_norm = layers.layer_norm(y, w, "ln2")
        z, hidden = layers.mlp(h, w)
        return y + z + w["out.bias"], (h, of_norm, hidden)

    def _after_backward(
        self, w: dict[str, Array], d: dict[str, Array], dz: Array, out: Array, kept: tuple
    ) -> tuple[Array, Array]:
        """Gradients of the residual stream, (n, E), and of attention's out, (n, H, D)."""
        h, of_norm, hidden = kept
        active = layers.gelu(hidden)
        da = layers.linear_backward(dz, active, w, d, "out")
        dhidden = layers.gelu_backward(da, hidden)
        dh = layers.linear_backward(dhidden, h, w, d, "fc")
        dy = dz + layers.layer_norm_backward(dh, of_norm, w, d, "ln2")
        dout = layers.linear_backward(dy, flat(out), w, d, "proj")
        return dy, dout.reshape(out.shape)
