"""Sizes of a GPT."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

POSITIONS = ("learned", "rotary")
# Arguments of linear attention in the linear layers of a model.
LINEAR = {"feature_map": "elu+1", "norm": "output"}


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a decoder-only transformer with LayerNorm before each part and tied embeddings.

    Attributes
    ----------
    vocab, layers, width, nheads : int
        V, L, E and H.
    seqlen : int
        Tokens of the longest sequence.
    nheads_kv : int, optional
        Hkv, KV heads (grouped queries).  Default: `nheads`.
    positions : {"learned", "rotary"}
        Learned embeddings (GPT-3), or rotary embeddings (Su et al., arXiv:2104.09864).
    headdim : int, optional
        D, elements of a head.  Default: ``width // nheads``.  With one KV head and a large D the
        model has Multi-matrix Factorization Attention (arXiv:2412.19255).
    layer_pattern : str
        One letter for each layer, repeated: N for exact attention, L for linear attention.
        LASP-2H (arXiv:2502.07563) has "LLLN".

    Raises
    ------
    ValueError
        If a size is not positive, or sizes do not fit each other.
    """

    vocab: int
    layers: int
    width: int
    nheads: int
    seqlen: int
    nheads_kv: int | None = None
    positions: Literal["learned", "rotary"] = "learned"
    headdim: int | None = None
    layer_pattern: str = "N"

    def __post_init__(self) -> None:
        if self.nheads_kv is None:
            object.__setattr__(self, "nheads_kv", self.nheads)
        sizes = ["vocab", "layers", "width", "nheads", "seqlen", "nheads_kv"]
        for name in sizes + ["headdim"] * (self.headdim is not None):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        uneven = self.headdim is None and self.width % self.nheads
        if uneven or self.nheads % self.nheads_kv:
            raise ValueError(
                f"nheads must divide width (without a headdim) and nheads_kv must divide nheads, "
                f"got width {self.width}, nheads {self.nheads} and nheads_kv {self.nheads_kv}"
            )
        if self.headdim is None:
            object.__setattr__(self, "headdim", self.width // self.nheads)
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {POSITIONS}, got {self.positions!r}")
        if self.positions == "rotary" and self.headdim % 2:
            raise ValueError(f"rotary positions need an even headdim, got {self.headdim}")
        if not self.layer_pattern or set(self.layer_pattern) - {"L", "N"}:
            raise ValueError(f"layer_pattern must consist of L and N, got {self.layer_pattern!r}")
        if self.hybrid and self.nheads_kv != self.nheads:
            raise ValueError(
                f"linear layers (layer_pattern {self.layer_pattern}) need as many KV heads as "
                f"heads, got nheads {self.nheads} and nheads_kv {self.nheads_kv}"
            )

    @property
    def hybrid(self) -> bool:
        """True if some layers have linear attention."""
        return any(self.is_linear(layer) for layer in range(self.layers))

    def is_linear(self, layer: int) -> bool:
        """Return whether a layer has linear attention."""
        return self.layer_pattern[layer % len(self.layer_pattern)] == "L"

    @property
    def stored(self) -> dict[str, object]:
        """The fields that checkpoints have, without a default headdim and a default pattern.

        Leaving these out keeps the text and the checksum of files of earlier versions.
        """
        fields = asdict(self)
        if self.nheads * self.headdim == self.width:
            del fields["headdim"]
        if not self.hybrid:
            del fields["layer_pattern"]
        return fields

    @property
    def mlp(self) -> int:
        """Width of the hidden layer of an MLP: M."""
        return 4 * self.width

    @property
    def heads(self) -> dict[str, int]:
        """Arguments of a plan: number of heads, number of KV heads, and head dimension."""
        return {"nheads": self.nheads, "nheads_kv": self.nheads_kv, "headdim": self.headdim}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by name.

        The backward pass finishes gradients in the reverse order.  Names come from GPT-2.  ``wte``
        embeds tokens; its transpose gives the logits.  ``wpe`` embeds positions.  ``h{i}.`` is
        layer i: ``ln1`` and ``ln2`` are LayerNorms, ``qkv`` and ``proj`` belong to attention, and
        ``fc`` and ``out`` to the MLP.
        """
        e, m, qkv = self.width, self.mlp, (self.nheads + 2 * self.nheads_kv) * self.headdim
        layer = {"ln1": (e,), "qkv": (e, qkv), "proj": (self.nheads * self.headdim, e)}
        layer |= {"ln2": (e,), "fc": (e, m), "out": (m, e)}
        layers = {f"h{i}.{x}": layer[x] for i in range(self.layers) for x in layer}
        shapes = {"wte": (self.vocab, e)}
        if self.positions == "learned":
            shapes["wpe"] = (self.seqlen, e)
        for name, shape in {**layers, "ln_f": (e,)}.items():
            shapes[f"{name}.weight"] = shape  # a matrix is (inputs, outputs)
            shapes[f"{name}.bias"] = shape[-1:]
        return shapes

    @property
    def of_layer(self) -> int:
        """Number of parameters of a layer."""
        return sum(math.prod(x) for name, x in self.shapes.items() if name.startswith("h0."))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.shapes.values()))


# Layers, width and heads of "Language Models are Few-Shot Learners" (arXiv:2005.14165), table 2.1.
PRESETS = {
    "tiny": GPTConfig(256, 4, 128, 4, 1024),
    # One KV head, and heads that together are twice as wide as the model.  Step-3
    # (arXiv:2507.19427) has 64 heads of 256 for a width of 7168.
    "mfa-tiny": GPTConfig(256, 4, 128, 4, 1024, nheads_kv=1, positions="rotary", headdim=64),
    **{
        f"gpt3-{name}": GPTConfig(50257, layers, width, nheads, 2048)
        for name, layers, width, nheads in (
            ("125m", 12, 768, 12),
            ("350m", 24, 1024, 16),
            ("760m", 24, 1536, 16),
            ("2.7b", 32, 2560, 32),
            ("6.7b", 32, 4096, 32),
            ("175b", 96, 12288, 96),
            ("175b-layer", 1, 12288, 96),
        )
    },
}
