"""Sizes of a GPT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

POSITIONS = ("learned", "rotary")


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a decoder-only transformer with pre-LayerNorm blocks and tied embeddings.

    Attributes
    ----------
    vocab, layers, width, nheads : int
        V, L, E and H; the head dimension is ``width // nheads``.
    seqlen : int
        Tokens of the longest sequence.
    nheads_kv : int, optional
        Hkv, heads of keys and values (grouped queries).  Default: `nheads`.
    positions : {"learned", "rotary"}
        Learned embeddings (GPT-3), or rotary ones (Su et al., arXiv:2104.09864).

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

    def __post_init__(self) -> None:
        if self.nheads_kv is None:
            object.__setattr__(self, "nheads_kv", self.nheads)
        for name in ("vocab", "layers", "width", "nheads", "seqlen", "nheads_kv"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.width % self.nheads or self.nheads % self.nheads_kv:
            raise ValueError(
                f"nheads must divide width and nheads_kv must divide nheads, got width "
                f"{self.width}, nheads {self.nheads} and nheads_kv {self.nheads_kv}"
            )
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {POSITIONS}, got {self.positions!r}")
        if self.positions == "rotary" and self.headdim % 2:
            raise ValueError(f"rotary positions need an even headdim, got {self.headdim}")

    @property
    def headdim(self) -> int:
        """D, elements of a head."""
        return self.width // self.nheads

    @property
    def mlp(self) -> int:
        """M, width of the hidden layer of an MLP."""
        return 4 * self.width

    @property
    def heads(self) -> dict[str, int]:
        """Heads and their dimension, as a plan takes them."""
        return {"nheads": self.nheads, "nheads_kv": self.nheads_kv, "headdim": self.headdim}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, in the order in which their gradients are finished, backwards.

        Names are those of GPT-2: ``wte`` embeds tokens (and, transposed, gives the logits),
        ``wpe`` positions; of block i, ``h{i}.``, ``ln1``, ``ln2`` are LayerNorms, ``qkv`` and
        ``proj`` belong to attention, ``fc`` and ``out`` to the MLP.
        """
        shapes = {"wte": (self.vocab, self.width)}
        if self.positions == "learned":
            shapes["wpe"] = (self.seqlen, self.width)
        for i in range(self.layers):
            shapes |= {f"h{i}.{name}": shape for name, shape in self._block.items()}
        return shapes | _norm("ln_f", self.width)

    @property
    def _block(self) -> dict[str, tuple[int, ...]]:
        e, m = self.width, self.mlp
        return {
            **_norm("ln1", e),
            **_linear("qkv", e, (self.nheads + 2 * self.nheads_kv) * self.headdim),
            **_linear("proj", e, e),
            **_norm("ln2", e),
            **_linear("fc", e, m),
            **_linear("out", m, e),
        }

    @property
    def of_block(self) -> int:
        """Number of parameters of a block."""
        return sum(map(math.prod, self._block.values()))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        positions = self.seqlen if self.positions == "learned" else 0
        return self.layers * self.of_block + (self.vocab + positions + 2) * self.width


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


# Layers, width and heads of "Language Models are Few-Shot Learners" (arXiv:2005.14165), table 2.1.
PRESETS = {
    "tiny": GPTConfig(256, 4, 128, 4, 1024),
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
