"""A BERT encoder (Devlin et al., arXiv:1810.04805), forward, on the tokens of one rank.

    x = norm(word[token] + position[place] + segment[0])
    for each layer:
        x = norm(x + dense(attention(query(x), key(x), value(x))))
        x = norm(x + dense(gelu(dense(x))))

As in a GPT, attention is the only layer where rows meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from a2d_mpi.gpt.layers import flat, layer_norm

Attend = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

# NumPy has no erfc; math.erfc is exact to double precision and fast enough for this.
_erfc = np.frompyfunc(math.erfc, 1, 1)


def gelu(x: np.ndarray) -> np.ndarray:
    """Exact GELU, x * Phi(x); erfc, unlike 1 + erf, does not cancel for x far below 0."""
    return 0.5 * x * _erfc(x * -math.sqrt(0.5)).astype(x.dtype)


class Encoder:
    """An encoder on one rank's tokens.

    Parameters
    ----------
    config : dict
        The model's ``config.json``.
    weights : dict of str to ndarray
        Keys are the names of Hugging Face's BertModel; weights of linear layers are (out, in).
    """

    def __init__(self, config: Mapping[str, object], weights: Mapping[str, np.ndarray]) -> None:
        self.config, self.weights = config, weights
        self.layers: int = config["num_hidden_layers"]

    @property
    def heads(self) -> dict[str, int]:
        """Heads and their dimension, as a plan takes them."""
        nheads = self.config["num_attention_heads"]
        return {"nheads": nheads, "headdim": self.config["hidden_size"] // nheads}

    def embed(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Input of the first layer, (n, E), of tokens (n,) at places (n,) of their documents."""
        names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        words, positions, segments = (self.weights[f"embeddings.{x}.weight"] for x in names)
        return self._norm(words[tokens] + positions[places] + segments[0], "embeddings.LayerNorm")

    def qkv(self, x: np.ndarray, layer: int) -> list[np.ndarray]:
        """Queries (not scaled), keys and values of a layer, (n, H, D) each, of its input."""
        name = f"encoder.layer.{layer}.attention.self"
        shape = (len(x), *self.heads.values())
        return [self._dense(x, f"{name}.{y}").reshape(shape) for y in ("query", "key", "value")]

    def layer(self, x: np.ndarray, layer: int, attend: Attend) -> np.ndarray:
        """Output of a layer, (n, E); `attend` gives out, (n, H, D), of q, k and v."""
        name = f"encoder.layer.{layer}"
        out = flat(attend(*self.qkv(x, layer)))
        x = x + self._dense(out, f"{name}.attention.output.dense")
        x = self._norm(x, f"{name}.attention.output.LayerNorm")
        inner = gelu(self._dense(x, f"{name}.intermediate.dense"))  # (n, M)
        x = x + self._dense(inner, f"{name}.output.dense")
        return self._norm(x, f"{name}.output.LayerNorm")

    def hidden(self, tokens: np.ndarray, places: np.ndarray, attend: Attend) -> np.ndarray:
        """Output of the last layer, (n, E)."""
        x = self.embed(tokens, places)
        for layer in range(self.layers):
            x = self.layer(x, layer, attend)
        return x

    def _dense(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x, self.weights, name, self.config["layer_norm_eps"])[0]
