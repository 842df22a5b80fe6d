"""A GPT, forward and backward, on the tokens of one rank.

    x = wte[token] + wpe[position]                        (Radford et al., GPT-2)
    for each layer:
        x = x + proj(attention(qkv(ln1(x))))
        x = x + out(gelu(fc(ln2(x))))
    logits = ln_f(x) @ wte.T

Every row is a token of this rank.  Attention is the only operation in which a row depends on other
rows, and the only one that communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from a2d_mpi.devices.protocol import Array
from a2d_mpi.gpt import layers
from a2d_mpi.gpt.layers import flat, module_of
from a2d_mpi.gpt.parameters import Parameters
from a2d_mpi.linear.features import rotate, rotation


class Attention(Protocol):
    """The interface of plans that a model uses.

    Implementations are `a2d_mpi.attention.plan.AttentionPlan` and
    `a2d_mpi.linear.plan.LinearAttention`, whose `Kept` takes the place of lse.
    """

    tokens: np.ndarray

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Compute out and lse of this rank's queries."""

    def backward(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array
    ) -> tuple[Array, Array, Array]:
        """Compute the gradients of this rank's q, k and v."""


class GPT:
    """A GPT on one rank's tokens.

    Parameters
    ----------
    weights : Parameters
    attention : Attention
        A plan with the sizes of the model; its `tokens` are this rank's tokens.
    positions : (n,) int64, optional
        Positions of this rank's tokens in their documents.  Default: their positions in the
        sequence.
    checkpoint : bool
        Each layer keeps only its input, and attention's out and lse.  The backward pass recomputes
        everything else but attention (Li et al., DistFlashAttn, arXiv:2310.03294).
    linear : Attention, optional
        Plan of the model's linear layers, if it has any, with the same tokens.

    Raises
    ------
    ValueError
        If the model has linear layers and `linear` is missing.
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
            raise ValueError(
                f"layer_pattern {self.config.layer_pattern} needs a plan of linear attention, too"
            )
        xp = module_of(weights.flat)
        positions = attention.tokens if positions is None else positions
        self._positions = xp.asarray(positions)
        self._rotation = None
        if self.config.positions == "rotary":
            both = rotation(positions, self.config.headdim, weights.flat.dtype)
            self._rotation = [xp.asarray(x[:, None]) for x in both]  # (n, 1, D / 2)

    def loss(
        self,
        tokens: Array,
        targets: Array,
        count: int,
        gradients: Parameters | None = None,
        finished: Callable[[slice], None] = lambda bucket: None,
    ) -> float:
        """Compute this rank's term of the mean loss; the loss is the sum over ranks.  Collective.

        Parameters
        ----------
        tokens, targets : (n,) int64
            Tokens and targets of this rank; a token with target -1 does not count.
        count : int
            Targets of all ranks, the divisor of the mean.
        gradients : Parameters, optional
            Overwritten by this rank's term of the gradient.  Default: no backward pass.
        finished : callable
            Called with each slice of the flat gradient when the slice is finished, in the same
            order on all ranks.

        Returns
        -------
        float
            This rank's term of the mean loss, in nats per target.
        """
        if gradients is None:
            return layers.cross_entropy(self.logits(self.hidden(tokens)), targets) / count
        x, kept = self._embed(tokens), []
        for i in range(self.config.layers):
            x, of_layer = self._layer(i, x)
            kept.append(of_layer)
        gradients.flat[:] = 0
        w, d = self.weights.named, gradients.named
        h, of_norm = layers.layer_norm(x, w, "ln_f")
        dlogits = self.logits(h)  # (n, V); the logits become their gradient
        loss = layers.cross_entropy(dlogits, targets) / count
        dlogits *= 1 / count
        d["wte"] += dlogits.T @ h
        dx = layers.layer_norm_backward(dlogits @ w["wte"], of_norm, w, d, "ln_f")
        del dlogits, h, of_norm  # they are large, and the loop below allocates more
        buckets = gradients.buckets()
        for i in reversed(range(self.config.layers)):
            dx = self._layer_backward(i, dx, kept.pop(), gradients)
            finished(next(buckets))
        layers.add_rows(d["wte"], tokens, dx)
        if "wpe" in d:
            layers.add_rows(d["wpe"], self._positions, dx)
        finished(next(buckets))
        return loss

    def hidden(self, tokens: Array) -> Array:
        """Compute the normalised output of the last layer, (n, E), of this rank's tokens.

        Collective.
        """
        x, w = self._embed(tokens), self.weights.named
        for i in range(self.config.layers):
            x, _ = self._layer(i, x)
        return layers.layer_norm(x, w, "ln_f")[0]

    def attend(self, i: int, x: Array) -> tuple[Array, Array]:
        """Compute layer i up to its MLP; return the residual stream and the MLP's input, (n, E).

        Collective.
        """
        w = self.weights.by_layer[i]
        qkv, _ = self._before(w, x)
        out, _ = self.attention.forward(*qkv)
        y = x + flat(out) @ w["proj.weight"] + w["proj.bias"]
        return y, layers.layer_norm(y, w, "ln2")[0]

    def logits(self, hidden: Array) -> Array:
        """Compute the logits, (n, V), of rows that `hidden` has returned."""
        return hidden @ self.weights.named["wte"].T

    def _embed(self, tokens: Array) -> Array:
        w = self.weights.named
        x = w["wte"][tokens]  # (n, E)
        return x + w["wpe"][self._positions] if "wpe" in w else x

    def _layer(self, i: int, x: Array) -> tuple[Array, tuple]:
        """Compute a layer; return its output, and what its backward pass needs.

        This is the input, (n, E), attention's out and lse, which are never computed again, and all
        other arrays (see `_before` and `_after`), or None if the backward pass recomputes these.
        """
        w = self.weights.by_layer[i]
        qkv, of_norm = self._before(w, x)
        out, lse = self._attention_of(i).forward(*qkv)  # (n, H, D), (n, H)
        y, of_mlp = self._after(w, x, out)
        inside = None if self.checkpoint else (qkv, of_norm, of_mlp)
        return y, (x, out, lse, inside)

    def _layer_backward(self, i: int, dy: Array, kept: tuple, gradients: Parameters) -> Array:
        """Compute the gradient of a layer's input, and add the gradients of its weights."""
        w, d = self.weights.by_layer[i], gradients.by_layer[i]
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
        """Compute q, (n, H, D), k and v, (n, Hkv, D); also return what LayerNorm keeps."""
        h, of_norm = layers.layer_norm(x, w, "ln1")
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
        dh = layers.linear_backward(joined, h, w, d, "qkv")
        return layers.layer_norm_backward(dh, of_norm, w, d, "ln1")

    def _split(self, qkv: Array) -> list[Array]:
        """Split columns into the heads of q, k and v, each contiguous."""
        heads = (self.config.nheads, self.config.nheads_kv, self.config.nheads_kv)
        xp, headdim = module_of(qkv), self.config.headdim
        q_end, k_end = heads[0] * headdim, sum(heads[:2]) * headdim
        views = qkv[:, :q_end], qkv[:, q_end:k_end], qkv[:, k_end:]
        return [xp.ascontiguousarray(x).reshape(len(x), n, headdim) for x, n in zip(views, heads)]

    def _after(self, w: dict[str, Array], x: Array, out: Array) -> tuple[Array, tuple]:
        """Compute a layer after attention, (n, E); also return arrays for the backward pass."""
        y = x + flat(out) @ w["proj.weight"] + w["proj.bias"]
        h, of_norm = layers.layer_norm(y, w, "ln2")
        z, hidden = layers.mlp(h, w)
        return y + z + w["out.bias"], (h, of_norm, hidden)

    def _after_backward(
        self, w: dict[str, Array], d: dict[str, Array], dz: Array, out: Array, kept: tuple
    ) -> tuple[Array, Array]:
        """Compute the gradients of the residual stream, (n, E), and attention's out, (n, H, D)."""
        h, of_norm, hidden = kept
        active = layers.gelu(hidden)
        da = layers.linear_backward(dz, active, w, d, "out")
        dhidden = layers.gelu_backward(da, hidden)
        dh = layers.linear_backward(dhidden, h, w, d, "fc")
        dy = dz + layers.layer_norm_backward(dh, of_norm, w, d, "ln2")
        dout = layers.linear_backward(dy, flat(out), w, d, "proj")
        return dy, dout.reshape(out.shape)
