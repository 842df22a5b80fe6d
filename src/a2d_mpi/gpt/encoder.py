"""A BERT encoder (Devlin et al., arXiv:1810.04805), forward, on the tokens of one rank.

    x = norm(word[token] + position[place] + segment[0])
    for each layer:
        x = norm(x + dense(attention(query(x), key(x), value(x))))
        x = norm(x + dense(gelu(dense(x))))

As in a GPT, attention is the only layer in which a row depends on other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from a2d_mpi.gpt.layers import flat, layer_norm

Attend = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

# NumPy has no erfc.  math.erfc is exact to double precision and fast enough here.
_erfc = np.frompyfunc(math.erfc, 1, 1)


def gelu(x: np.ndarray) -> np.ndarray:
    """Compute the exact GELU, x * Phi(x); unlike 1 + erf, erfc is accurate for x far below 0."""
    return 0.5 * x * _erfc(x * -math.sqrt(0.5)).astype(x.dtype)


class Encoder:
    """A BERT encoder on one rank's tokens.

    Parameters
    ----------
    config : dict
        The model's ``config.json``.
    weights : dict of str to ndarray
        The weights by their names in Hugging Face's BertModel; a matrix is (outputs, inputs).
    """

    def __init__(self, config: Mapping[str, object], weights: Mapping[str, np.ndarray]) -> None:
        self.config, self.weights = config, weights
        self.layers: int = config["num_hidden_layers"]

    @property
    def heads(self) -> dict[str, int]:
        """Arguments of a plan: number of heads and head dimension."""
        nheads = self.config["num_attention_heads"]
        return {"nheads": nheads, "headdim": self.config["hidden_size"] // nheads}

    def embed(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the input of the first layer, (n, E), for tokens (n,) at places (n,).

        The place of a token is its position in its document.
        """
        names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        words, positions, segments = (self.weights[f"embeddings.{x}.weight"] for x in names)
        return self._norm(words[tokens] + positions[places] + segments[0], "embeddings.LayerNorm")

    def qkv(self, x: np.ndarray, layer: int) -> list[np.ndarray]:
        """Compute queries (not scaled), keys and values, (n, H, D) each, of a layer's input x."""
        name = f"encoder.layer.{layer}.attention.self"
        shape = (len(x), *self.heads.values())
        return [self._dense(x, f"{name}.{y}").reshape(shape) for y in ("query", "key", "value")]

    def layer(self, x: np.ndarray, layer: int, attend: Attend) -> np.ndarray:
        """Compute the output of a layer, (n, E).  `attend` computes out, (n, H, D), of q, k, v."""
        name = f"encoder.layer.{layer}"
        out = flat(attend(*self.qkv(x, layer)))
        x = x + self._dense(out, f"{name}.attention.output.dense")
        x = self._norm(x, f"{name}.attention.output.LayerNorm")
        inner = gelu(self._dense(x, f"{name}.intermediate.dense"))  # (n, M)
        x = x + self._dense(inner, f"{name}.output.dense")
        return self._norm(x, f"{name}.output.LayerNorm")

    def hidden(self, tokens: np.ndarray, places: np.ndarray, attend: Attend) -> np.ndarray:
        """Compute the output of the last layer, (n, E); parameters as of `embed` and `layer`."""
        x = self.embed(tokens, places)
        for layer in range(self.layers):
            x = self.layer(x, layer, attend)
        return x

    def _dense(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x, self.weights, name, self.config["layer_norm_eps"])[0]
